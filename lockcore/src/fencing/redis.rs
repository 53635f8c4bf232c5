//! Guarded writes for Redis and Valkey, as Lua scripts for any client library.
//!
//! Beside the value there is another key, its *fence*, with the highest token that has passed. In a
//! cluster both must be in one slot: `order:{42}` and `order:{42}:fence`.
//!
//! ```no_run
//! use lockcore::WriteToken;
//! use lockcore::fencing::redis::SET_IF_NEWEST;
//! use redis::aio::MultiplexedConnection;
//!
//! /// False: refused, and nothing was written.
//! async fn set_price(
//!     shop: &mut MultiplexedConnection,
//!     item: u64,
//!     price: u32,
//!     token: WriteToken,
//! ) -> redis::RedisResult<bool> {
//!     redis::Script::new(SET_IF_NEWEST)
//!         .key(format!("price:{{{item}}}"))
//!         .key(format!("price:{{{item}}}:fence"))
//!         .arg(token.to_string())
//!         .arg(price)
//!         .arg("86400000") // a day: nobody writes later than that
//!         .invoke_async(shop)
//!         .await
//! }
//! # fn main() {}
//! ```
//!
//! A write of another kind begins with [`CHECK`]:
//!
//! ```
//! use lockcore::fencing::redis::CHECK;
//!
//! let sell = format!(
//!     "{CHECK}
//!     if not fence(KEYS[2], ARGV[1], ARGV[2]) then return 0 end
//!     redis.call('DECRBY', KEYS[1], ARGV[3])
//!     return 1"
//! );
//! # assert!(sell.contains("local fence"));
//! ```
//!
//! # What Redis can promise
//!
//! The fence is as durable as the value beside it: what a server forgets when it restarts, or when a
//! replica is promoted that was behind, it forgets of both. Keys that are evicted or expire are
//! forgotten one by one, so use `maxmemory-policy noeviction`. And a fence that is remembered for a
//! day keeps out what is late by less than a day.

/// Lua to put at the beginning of a script: defines `fence(key, token, keep_ms)`.
///
/// Returns true when the token has passed, and the fence is raised to it; false when a higher one was
/// here. `key` is that of the fence, `token` the text of a [`WriteToken`](crate::WriteToken), `keep_ms`
/// how long the fence is remembered after the last token that has passed, `"0"` for ever: the same for
/// all who use it. Call it before the first write. A text that is no token stops the script with an
/// error.
pub const CHECK: &str = include_str!("redis/check.lua");

/// A script that sets a value unless somebody with a higher token has.
///
/// `KEYS`: the value, its fence. `ARGV`: token, value, how long the fence is remembered in
/// milliseconds (`"0"` for ever). Replies 1 when it was set, **0 when it was refused**. The value has
/// no expiry.
pub const SET_IF_NEWEST: &str = concat!(
    include_str!("redis/check.lua"),
    "\n",
    include_str!("redis/set_if_newest.lua")
);
