//! The frames of all bodies in this crate: data in `Bytes`, errors boxed.

use bytes::{Buf, Bytes};
use http_body::Frame;

/// The error type of bodies: boxed, so that it can also be a lost lock ([`lockcore::Error`]).
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

pub(crate) type Part = Result<Frame<Bytes>, BoxError>;

pub(crate) fn of_ours<D: Buf, E: Into<BoxError>>(
    part: Option<Result<Frame<D>, E>>,
) -> Option<Part> {
    part.map(|part| part.map(in_bytes).map_err(Into::into))
}

/// Converts the data of a frame to [`Bytes`], the kind of buffer that all servers accept. [`Bytes`]
/// are not copied.
pub(crate) fn in_bytes<D: Buf>(frame: Frame<D>) -> Frame<Bytes> {
    frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))
}
