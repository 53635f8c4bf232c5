//! The calls of the procedures, as texts. All values but numbers are written in hexadecimal, so
//! nothing in them can end a text. A call needs nothing that an earlier one has left on the
//! connection: no settings, and no prepared statements.

use std::fmt::Write as _;

use super::wire::Row as WireRow;
use crate::backend::table::Row;
use crate::backend::{Fault, StoreError};
use crate::request::Id;

/// The layout version. It is in the names of the tables and in every key. So a change of this number
/// is a breaking release.
pub(super) const VERSION: u32 = 1;

/// The tables and the procedures.
pub(super) const SCHEMA: &str = include_str!("schema/lockcore1.sql");

/// The version of the procedures in this file. They serve clients of earlier versions too.
pub(super) const PROCEDURES: i64 = 3;

/// The statements of the file. A person runs it with the client of the server, which reads the
/// lines with `DELIMITER` itself.
pub(super) fn statements() -> impl Iterator<Item = String> {
    let lines = SCHEMA.lines().filter(|line| {
        let is_comment = line.starts_with("--");
        !is_comment && !line.starts_with("DELIMITER")
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    let statements: Vec<_> = text
        .split("//\n")
        .map(|part| part.trim().trim_end_matches("//").to_owned())
        .collect();
    statements
        .into_iter()
        .filter(|statement| !statement.is_empty())
}

/// A call, to be completed with its values.
#[derive(Clone, Debug)]
pub(super) struct Call {
    text: String,
    has_values: bool,
}

impl Call {
    pub(super) fn of(procedure: &str) -> Self {
        Self {
            text: format!("CALL lockcore1_{procedure}("),
            has_values: false,
        }
    }

    fn value(mut self, write: impl FnOnce(&mut String)) -> Self {
        if self.has_values {
            self.text.push(',');
        }
        self.has_values = true;
        write(&mut self.text);
        self
    }

    pub(super) fn bytes(self, bytes: impl AsRef<[u8]>) -> Self {
        self.value(|text| {
            text.push_str("x'");
            for byte in bytes.as_ref() {
                // Writing to a text does not fail.
                let _ = write!(text, "{byte:02x}");
            }
            text.push('\'');
        })
    }

    pub(super) fn number(self, number: impl Into<i64>) -> Self {
        self.value(|text| {
            let _ = write!(text, "{}", number.into());
        })
    }

    pub(super) fn id(self, id: Id) -> Self {
        self.bytes(id.to_bytes())
    }

    /// A null, or what `some` adds.
    pub(super) fn or_null<T>(self, value: Option<T>, some: impl FnOnce(Self, T) -> Self) -> Self {
        match value {
            Some(value) => some(self, value),
            None => self.value(|text| text.push_str("NULL")),
        }
    }

    pub(super) fn text(mut self) -> Vec<u8> {
        self.text.push(')');
        self.text.into_bytes()
    }
}

/// The only row of an answer.
pub(super) fn only(rows: Vec<WireRow>) -> Result<WireRow, StoreError> {
    rows.into_iter().next().ok_or_else(unreadable)
}

/// The request was carried out, but nobody knows the answer.
pub(super) fn unreadable() -> StoreError {
    StoreError::new(Fault::Unknown, "MySQL: unreadable answer")
}

impl WireRow {
    /// The value in a column. `None` is a null.
    pub(super) fn get(&self, column: &str) -> Result<Option<&[u8]>, StoreError> {
        let at = self.columns.iter().position(|known| known == column);
        let value = at.and_then(|at| self.values.get(at));
        value.map(Option::as_deref).ok_or_else(unreadable)
    }
}

impl Row for WireRow {
    fn int(&self, column: &'static str) -> Result<Option<i64>, StoreError> {
        let number = |bytes| std::str::from_utf8(bytes).ok()?.parse().ok();
        let value = self.get(column)?;
        value
            .map(|bytes| number(bytes).ok_or_else(unreadable))
            .transpose()
    }

    fn text(&self, column: &'static str) -> Result<Option<String>, StoreError> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec());
        let value = self.get(column)?;
        value
            .map(|bytes| text(bytes).map_err(|_| unreadable()))
            .transpose()
    }

    fn id(&self, column: &'static str) -> Result<Option<Id>, StoreError> {
        let id = |bytes: &[u8]| bytes.try_into().map(Id::from_bytes);
        let value = self.get(column)?;
        value
            .map(|bytes| id(bytes).map_err(|_| unreadable()))
            .transpose()
    }

    fn is(&self, column: &'static str) -> Result<bool, StoreError> {
        Ok(self.int(column)?.is_some_and(|flag| flag != 0))
    }
}

/// Fields of a text that answers for several tickets, as a row with these columns. An empty field is
/// a null.
pub(super) fn row(columns: &[&str], fields: &str) -> WireRow {
    let value = |field: &str| (!field.is_empty()).then(|| field.as_bytes().to_vec());
    WireRow {
        columns: columns.iter().map(|column| (*column).to_owned()).collect(),
        values: fields.split(',').map(value).collect(),
    }
}

/// The bytes that the server has written in hexadecimal.
pub(super) fn unhex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |digit: &u8| char::from(*digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => u8::try_from(digit(high)? << 4 | digit(low)?).ok(),
        _ => None,
    };
    digits.chunks(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_cannot_end_its_text() {
        let call = Call::of("stored")
            .bytes("a')")
            .number(-7)
            .or_null(None::<Id>, Call::id);
        assert_eq!(call.text(), b"CALL lockcore1_stored(x'612729',-7,NULL)");
    }

    #[test]
    fn the_file_has_the_version_of_its_procedures_and_makes_it_last() {
        let last = format!("CREATE PROCEDURE lockcore1_version() SELECT {PROCEDURES} AS version");
        // Behind it, the file gives its lock back.
        let statements: Vec<_> = statements().collect();
        assert_eq!(statements.iter().rev().nth(1), Some(&last));
        assert!(statements.iter().all(|statement| !statement.contains("//")));
    }

    /// Words that MySQL reserves and MariaDB does not, so that no test with MariaDB meets them. The
    /// list is that of MySQL 8.0, with what later versions have added.
    /// <https://dev.mysql.com/doc/refman/8.0/en/keywords.html>
    const RESERVED_BY_MYSQL: &str = "cube cume_dist dense_rank empty first_value function generated \
        get grouping groups io_after_gtids io_before_gtids lag last_value lateral lead library \
        manual master_bind nth_value ntile of optimizer_costs parallel percent_rank qualify rank row \
        row_number stored system tablesample virtual window";

    #[test]
    fn the_file_has_no_name_that_mysql_reserves() {
        let reserved: Vec<_> = RESERVED_BY_MYSQL.split_whitespace().collect();
        for line in SCHEMA.lines() {
            let code = line.split("--").next().unwrap_or_default();
            // Every second part is a text.
            for word in (code.split('\'').step_by(2))
                .flat_map(|part| part.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
            {
                let is_reserved = reserved.contains(&&*word.to_lowercase());
                assert!(!is_reserved, "{word} in: {line}");
            }
        }
    }
}
