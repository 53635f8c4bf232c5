//! Guarded writes for Redis and Valkey, as Lua scripts for any client library.
//!
//! Beside the value there is another key, its *fence*, which holds the highest token that has
//! passed. In a cluster both keys must be in one slot, as in `order:{42}` and `order:{42}:fence`.
//!
//! ```no_run
//! use lockcore::FencingToken;
//! use lockcore::fencing::redis::SET_IF_NEWEST;
//! use redis::aio::MultiplexedConnection;
//!
//! /// False: refused, and nothing was written.
//! async fn set_price(
//!     shop: &mut MultiplexedConnection,
//!     item: u64,
//!     price: u32,
//!     token: FencingToken,
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
//! A script for another kind of write begins with [`CHECK`]:
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
//! The fence is as durable as the value beside it. A server may forget data when it restarts, and a
//! replica that was behind may be promoted. In both cases the value and the fence are forgotten
//! together. But keys that are evicted or expire are forgotten one by one, so use `maxmemory-policy
//! noeviction`. A fence that is remembered for a day refuses writes that are less than a day late.

/// Lua to put at the beginning of a script. It defines `fence(key, token, keep_ms)`.
///
/// The function returns true when the token has passed: it is equal to the highest token so far, or
/// higher. Then the fence keeps it as the highest. The function returns false when a higher token
/// has passed before. Call it before the first write of the script, because a script that stops has
/// no rollback.
///
/// `key` is the key of the fence, and `token` is the text of a
/// [`FencingToken`](crate::FencingToken). A text that is not a token stops the script with an
/// error. `keep_ms` is how long the fence is remembered after the last token that has passed, or
/// `"0"` for ever. It must be the same for all users of the fence.
pub const CHECK: &str = include_str!("redis/check.lua");

/// A script that sets a value, unless a higher token has written it before.
///
/// `KEYS`: the value, its fence. `ARGV`: the token, the value, and how long the fence is remembered
/// in milliseconds (`"0"` for ever). Replies 1 when the value was set, **0 when the write was
/// refused**. The value has no expiry.
pub const SET_IF_NEWEST: &str = concat!(
    include_str!("redis/check.lua"),
    "\n",
    include_str!("redis/set_if_newest.lua")
);
