//! Headers: the header of the fencing token, and header names that users give.

use std::fmt;

use http::HeaderName;

/// The header, and in gRPC the metadata, in which a request sends a
/// [`FencingToken`](lockcore::FencingToken) to the service that receives the write:
/// `lock-fencing-token`.
pub const TOKEN_HEADER: HeaderName = HeaderName::from_static("lock-fencing-token");

/// # Errors
///
/// Returns a sentence if `name` cannot be the name of a header.
pub(crate) fn named<N>(name: N) -> Result<HeaderName, String>
where
    N: TryInto<HeaderName, Error: fmt::Display>,
{
    name.try_into()
        .map_err(|error| format!("not the name of a header: {error}"))
}

/// # Errors
///
/// As [`named`], and also if the key is that of binary metadata. A binary value has several texts
/// in base64, and each text would be another lock.
pub(crate) fn metadata<N>(key: N) -> Result<HeaderName, String>
where
    N: TryInto<HeaderName, Error: fmt::Display>,
{
    let key = named(key)?;
    match key.as_str().ends_with("-bin") {
        true => Err(format!(
            "the metadata \"{key}\" is binary; decode it in Key::from_fn"
        )),
        false => Ok(key),
    }
}
