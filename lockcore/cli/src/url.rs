//! What the URL of the store tells about the store, before it answers.

/// Whether the URL begins with one of these. As the library reads it: in upper or lower case, with or
/// without spaces around it.
pub(crate) fn begins_with(schemes: &[&str]) -> bool {
    let url = std::env::var("LOCK_URL").unwrap_or_default();
    let url = url.trim().to_ascii_lowercase();
    schemes.iter().any(|scheme| url.starts_with(scheme))
}
