//! The frames of bodies, as all bodies of this crate have them: in `Bytes`, with boxed errors.

use bytes::{Buf, Bytes};
use http_body::Frame;

/// What a body's error becomes, so that a lost lock ([`lockcore::Error`]) can be one too.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

pub(crate) type Part = Result<Frame<Bytes>, BoxError>;

pub(crate) fn of_ours<D: Buf, E: Into<BoxError>>(
    part: Option<Result<Frame<D>, E>>,
) -> Option<Part> {
    part.map(|part| part.map(in_bytes).map_err(Into::into))
}

/// The same frame in the one kind of buffer that all servers take. Free of charge for [`Bytes`].
pub(crate) fn in_bytes<D: Buf>(frame: Frame<D>) -> Frame<Bytes> {
    frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))
}
