//! The statements that are run on the open file. Each is compiled once. What their failures mean is
//! in `file`.

use std::rc::Rc;

use fallible_iterator::FallibleIterator as _;
use rusqlite::types::{FromSql, Value, ValueRef};
use rusqlite::{Batch, Connection, Statement, ToSql};

use crate::backend::{Fault, StoreError, table};
use crate::request::Id;

/// The statements that a handle has run so far.
pub(super) struct Statements<'h> {
    connection: &'h Connection,
    compiled: Vec<Compiled<'h>>,
}

/// The statements of one text.
struct Compiled<'h> {
    text: &'static str,
    statements: Vec<Step<'h>>,
}

/// One statement of a text, and the names of its columns.
struct Step<'h> {
    statement: Statement<'h>,
    columns: Rc<[String]>,
}

/// A row of an answer, copied, because the file must not stay locked while somebody reads it.
pub(super) struct Row {
    columns: Rc<[String]>,
    values: Vec<Value>,
}

impl<'h> Statements<'h> {
    pub(super) fn new(connection: &'h Connection) -> Self {
        Self {
            connection,
            compiled: Vec::new(),
        }
    }

    /// Runs a text of statements up to its end, or to the first error, and returns all their rows.
    /// `?3` is the same argument in each of them.
    pub(super) fn run(
        &mut self,
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> rusqlite::Result<Vec<Row>> {
        let mut rows = Vec::new();
        // There are some 30 texts, so comparing addresses costs less than a hash of the text.
        let mut known = self.compiled.iter_mut();
        if let Some(known) = known.find(|known| std::ptr::eq(known.text, text)) {
            for step in &mut known.statements {
                step.run(arguments, &mut rows)?;
            }
            return Ok(rows);
        }
        let mut statements = Vec::new();
        let mut batch = Batch::new(self.connection, text);
        // A statement may need a table that the one before it makes. So it is compiled after that
        // one was run.
        while let Some(statement) = batch.next()? {
            let mut step = Step::new(statement);
            step.run(arguments, &mut rows)?;
            statements.push(step);
        }
        self.compiled.push(Compiled { text, statements });
        Ok(rows)
    }
}

impl<'h> Step<'h> {
    fn new(statement: Statement<'h>) -> Self {
        let columns = statement.column_names().into_iter().map(str::to_owned);
        Self {
            columns: columns.collect(),
            statement,
        }
    }

    fn run(&mut self, arguments: &[&dyn ToSql], rows: &mut Vec<Row>) -> rusqlite::Result<()> {
        // SQLite counts the arguments up to the last one that this statement uses.
        let used = self.statement.parameter_count();
        debug_assert!(used <= arguments.len(), "an argument is missing");
        for (at, argument) in arguments.iter().take(used).enumerate() {
            self.statement.raw_bind_parameter(at + 1, argument)?;
        }
        let mut found = self.statement.raw_query();
        while let Some(row) = found.next()? {
            let values = (0..self.columns.len()).map(|at| row.get_ref(at).map(owned));
            rows.push(Row {
                values: values.collect::<rusqlite::Result<_>>()?,
                columns: Rc::clone(&self.columns),
            });
        }
        Ok(())
    }
}

/// A value that outlives its row. Only somebody who writes to the file by hand can store a text that
/// is not UTF-8. It is shown as well as possible, because one such text must not make the file
/// unusable.
fn owned(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => Value::Integer(number),
        ValueRef::Real(number) => Value::Real(number),
        ValueRef::Text(text) => Value::Text(String::from_utf8_lossy(text).into_owned()),
        ValueRef::Blob(bytes) => Value::Blob(bytes.to_vec()),
    }
}

impl table::Row for Row {
    fn int(&self, name: &'static str) -> Result<Option<i64>, StoreError> {
        column(self, name)
    }

    fn text(&self, name: &'static str) -> Result<Option<String>, StoreError> {
        column(self, name)
    }

    fn id(&self, name: &'static str) -> Result<Option<Id>, StoreError> {
        let text: Option<String> = column(self, name)?;
        let parse = |text: String| {
            let id = Id::parse(&text);
            id.ok_or_else(|| StoreError::new(Fault::Unknown, "SQLite: an id is not one"))
        };
        text.map(parse).transpose()
    }

    fn is(&self, name: &'static str) -> Result<bool, StoreError> {
        let flag: Option<i64> = column(self, name)?;
        Ok(flag.is_some_and(|flag| flag != 0))
    }
}

/// The value of a column.
pub(super) fn column<T: FromSql>(row: &Row, name: &'static str) -> Result<T, StoreError> {
    let at = row.columns.iter().position(|column| column == name);
    let value = at.and_then(|at| row.values.get(at));
    let read = match value {
        Some(value) => T::column_result(value.into()).map_err(|error| error.to_string()),
        None => Err("there is no such column".to_owned()),
    };
    // The transaction was committed before its rows are read, so the error must not say that
    // nothing was changed.
    read.map_err(|error| StoreError::new(Fault::Unknown, format!("SQLite: {name}: {error}")))
}
