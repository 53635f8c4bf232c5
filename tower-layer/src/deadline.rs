//! The deadline of the client: how long the client waits for the answer, if the request says so.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use http::{HeaderMap, HeaderName};
use tokio::time::{Instant, timeout_at};

/// The time at which the client stops waiting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    /// Whether the deadline applies to the whole response, as in gRPC, and not only to its
    /// beginning.
    pub(crate) ends_the_hold: bool,
}

/// The error that the deadline has passed.
#[derive(Debug)]
pub(crate) struct Overdue;

impl Deadline {
    /// `None` if the clock cannot represent the time.
    pub(crate) fn after(time: Duration, ends_the_hold: bool) -> Option<Self> {
        let at = Instant::now().checked_add(time)?;
        Some(Self { at, ends_the_hold })
    }

    /// How long the request may wait for the lock, so that the answer reaches the client before its
    /// deadline. A lock that is granted at the last moment does not help the client. Besides, the
    /// server's own timer would answer before the layer does.
    pub(crate) fn wait(self) -> Duration {
        // About the time of a round trip around the world.
        const MOST: Duration = Duration::from_millis(50);
        let left = self.at.saturating_duration_since(Instant::now());
        left - (left / 10).min(MOST)
    }

    pub(crate) fn has_passed(self) -> bool {
        self.at <= Instant::now()
    }

    /// The result of `future`, if it is ready before the deadline.
    ///
    /// The future is borrowed. An `async fn` keeps its argument and the pinned copy of it, so its
    /// future has room for both.
    pub(crate) async fn end<T>(
        this: Option<Self>,
        future: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Overdue> {
        match this {
            Some(this) => timeout_at(this.at, future).await.map_err(|_| Overdue),
            None => Ok(future.await),
        }
    }
}

/// Parses `grpc-timeout`: at most eight digits and a unit. Any other value is ignored, as in tonic
/// and in gRPC's C core.
///
/// <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests>
pub(crate) fn of_grpc(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let number = number(digits)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 60 * 60),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Parses a number of milliseconds. Any other value is ignored.
pub(crate) fn of_header(headers: &HeaderMap, name: &HeaderName) -> Option<Duration> {
    let value = headers.get(name)?.to_str().ok()?;
    number(value).map(Duration::from_millis)
}

/// Accepts only digits. `u64::from_str` would also accept a sign.
fn number(digits: &str) -> Option<u64> {
    let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    all_digits.then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grpc(value: &[u8]) -> Option<Duration> {
        let value = http::HeaderValue::from_bytes(value).unwrap();
        of_grpc(&HeaderMap::from_iter([(
            HeaderName::from_static("grpc-timeout"),
            value,
        )]))
    }

    #[test]
    fn every_unit_of_a_grpc_timeout_is_understood() {
        assert_eq!(grpc(b"2H"), Some(Duration::from_secs(7_200)));
        assert_eq!(grpc(b"3M"), Some(Duration::from_secs(180)));
        assert_eq!(grpc(b"4S"), Some(Duration::from_secs(4)));
        assert_eq!(grpc(b"5m"), Some(Duration::from_millis(5)));
        assert_eq!(grpc(b"6u"), Some(Duration::from_micros(6)));
        assert_eq!(grpc(b"0n"), Some(Duration::ZERO));
        assert_eq!(
            grpc(b"99999999H"),
            Some(Duration::from_secs(99_999_999 * 3_600))
        );
    }

    #[test]
    fn a_malformed_grpc_timeout_is_no_deadline() {
        let bad: [&[u8]; 10] = [
            b"",
            b"S",
            b"5",
            b"5s",
            b"-5S",
            b"+5S",
            b"5 S",
            b"1.5S",
            b"123456789S",
            b"5\xe4",
        ];
        for value in bad {
            assert_eq!(grpc(value), None, "{value:?}");
        }
    }

    #[test]
    fn only_digits_are_a_deadline_in_milliseconds() {
        let name = HeaderName::from_static("x-deadline");
        let of = |value: &str| {
            let headers = HeaderMap::from_iter([(name.clone(), value.parse().unwrap())]);
            of_header(&headers, &name)
        };

        assert_eq!(of("1500"), Some(Duration::from_millis(1_500)));
        for value in ["", "-1", "+1", "1.5", "2s", "99999999999999999999"] {
            assert_eq!(of(value), None, "{value}");
        }
    }
}
