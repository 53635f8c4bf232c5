//! The number of a grant, in two types. A [`GrantId`] names any grant. A [`FencingToken`] is the
//! number of an exclusive grant, and tokens can be compared. Each store's guide (`lockcore::guide`)
//! describes how ticket numbers are drawn. How a resource checks a token is in `fencing`.

use std::fmt;
use std::str::FromStr;

/// The identity of one grant of one lock, for logs and events.
///
/// This type has no order. One reason is that grants of shared locks and of semaphores have no
/// order. The other is that grants of *different* names must not be compared. A resource compares
/// [`FencingToken`]s. The token of an exclusive grant is the same number as its grant id.
///
/// It fits into an `i64`. The upper 53 bits are the number of the ticket at the store, the lower 10
/// bits count hand-overs inside one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrantId(u64);

/// Bits below the ticket's number: hand-overs inside one process.
const HAND_OVER_BITS: u32 = 10;

/// The largest number of a ticket: 53 bits, which a double represents exactly (Lua, sorted sets,
/// JSON).
pub const MAX_TICKET: u64 = (1 << 53) - 1;

impl GrantId {
    /// The grant of a holder. `ticket` is at most [`MAX_TICKET`]. `hand_overs` is the number of
    /// hand-overs inside the process before this holder: fewer than 1,024.
    pub(crate) const fn of_ticket(ticket: u64, hand_overs: u16) -> Self {
        Self((ticket << HAND_OVER_BITS) | hand_overs as u64)
    }

    /// The number of the ticket at the store, which [`Locks::inspect`](crate::Locks::inspect)
    /// shows. When holders inside one process hand a ticket over to each other, this number stays
    /// the same.
    #[must_use]
    pub const fn ticket(self) -> u64 {
        self.0 >> HAND_OVER_BITS
    }

    /// How many times the ticket was handed over inside a process before this holder.
    pub(crate) const fn hand_overs(self) -> u16 {
        (self.0 & ((1 << HAND_OVER_BITS) - 1)) as u16
    }

    /// The grant with this number. `None` if no grant can have this number.
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        let is_one = number >> HAND_OVER_BITS > 0 && i64::try_from(number).is_ok();
        is_one.then_some(Self(number))
    }

    /// The identity as a number, for structured logs and metrics. At most 2⁶³ − 1.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number by which a protected resource knows which of two exclusive holders is the later holder.
/// It comes from [`Held::fencing_token`](crate::Held::fencing_token), or from another service as
/// text, by [`str::parse`].
///
/// Every exclusive grant of a name has a greater token than every earlier exclusive grant of that
/// name. A resource should remember the highest token that it has seen, and refuse lower ones. Then
/// it refuses a late write of a holder that was frozen while the lock went to somebody else.
/// [`fencing`](crate::fencing) has such checks for SQL and Redis.
///
/// Compare only tokens of the same name at the same store. A token from outside does not prove
/// which process has sent it: it is a number, not a credential. If the store loses its data, tokens
/// can go back: by as much as the store's clock did, and on ZooKeeper and etcd to the beginning, or
/// to the backup that was restored.
///
/// As text it is a decimal number without sign or leading zeros, from 1 to 2⁶³ − 1.
///
/// ```
/// use lockcore::FencingToken;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("order:42").acquire().await?;
/// let token = guard.fencing_token()?;
/// assert_eq!(token.to_string().parse::<FencingToken>()?, token);
///
/// let reader = locks.rwlock("catalog:7").read().acquire().await?;
/// assert!(reader.fencing_token().is_err());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

impl FencingToken {
    /// The token of a grant that excludes all others.
    pub(crate) const fn of_exclusive(grant: GrantId) -> Self {
        Self(grant.0)
    }

    /// The number of the holder's ticket at the store: see [`GrantId::ticket`].
    #[must_use]
    pub const fn ticket(self) -> u64 {
        self.0 >> HAND_OVER_BITS
    }

    /// The token as a number for a database column (`BIGINT`). Always greater than zero.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        // 53 + 10 bits: the sign bit is never set.
        self.0 as i64
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for FencingToken {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        // The text has only digits, and each number has only one form, because a resource may
        // compare the texts.
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse::<i64>().map_err(|_| ParseTokenError)?;
        if !digits || text.starts_with('0') {
            return Err(ParseTokenError);
        }
        Ok(Self(number.unsigned_abs()))
    }
}

/// The error for a text that is no fencing token: see [`FencingToken`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a fencing token: it is a decimal number from 1 to 9223372036854775807")]
#[non_exhaustive]
pub struct ParseTokenError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_token_is_read_in_one_form_only() {
        for number in ["1", "1023", "9007199254740993", "9223372036854775807"] {
            let token: FencingToken = number.parse().unwrap();
            assert_eq!(token.to_string(), number);
            assert_eq!(token.as_i64().to_string(), number);
        }
        for text in [
            "",
            "0",
            "-1",
            "+1",
            "007",
            " 7",
            "7 ",
            "7.0",
            "7e3",
            "0x7",
            "٧",
            "9223372036854775808",
        ] {
            assert_eq!(
                text.parse::<FencingToken>(),
                Err(ParseTokenError),
                "{text:?}"
            );
        }
    }

    #[test]
    fn the_largest_token_fits_a_signed_column() {
        let grant = GrantId::of_ticket(MAX_TICKET, 1_000);
        let token = FencingToken::of_exclusive(grant);

        assert!(token.as_i64() > 0);
        assert_eq!(token.as_i64().unsigned_abs(), grant.as_u64());
    }
}
