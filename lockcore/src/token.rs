//! The fencing token. How ticket numbers are drawn is each store's business (see its page).

use std::fmt;

/// A number that tells a protected resource which of two holders is the later one.
///
/// Every exclusive grant on a name carries a token greater than that of every earlier exclusive
/// grant on that name. A resource that keeps the highest token it has seen, and refuses lower
/// ones, is safe even from a holder that was frozen and wakes up after its lease went to somebody
/// else. Tokens of *different* names, and tokens of shared or semaphore grants, are only
/// identities: they must not be compared.
///
/// It fits an `i64`, so that any database column can keep it. The upper 53 bits are the number of
/// the ticket at the store, the lower 10 count hand-overs inside one process.
///
/// If the store loses its data the token can go back by as much as the store's clock did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

/// Bits below the ticket's number: hand-overs inside one process.
const HAND_OVER_BITS: u32 = 10;

/// The largest number a ticket can have: 53 bits, exact in a double (Lua, sorted sets, JSON).
pub const MAX_TICKET: u64 = (1 << 53) - 1;

impl FencingToken {
    /// The token of who holds a ticket after so many hand-overs inside the process: fewer than
    /// 1,024. `ticket` is at most [`MAX_TICKET`].
    pub(crate) const fn of_ticket(ticket: u64, hand_overs: u16) -> Self {
        Self((ticket << HAND_OVER_BITS) | hand_overs as u64)
    }

    /// The token as a number.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// The token as a signed number, for databases without unsigned columns; never negative.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_token_fits_a_signed_column() {
        let token = FencingToken::of_ticket(MAX_TICKET, 1_000);

        assert!(token.as_i64() > 0);
        assert_eq!(token.as_i64().unsigned_abs(), token.as_u64());
    }
}
