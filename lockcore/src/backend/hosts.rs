//! Reads the servers of a URL that may name several, for every store that takes several. The parser
//! of URLs takes them for one host, because `open` has escaped them.

use percent_encoding::percent_decode_str;
use url::Url;

/// The hosts of a URL that may name several, and their ports. An address of IPv6 is in brackets.
///
/// The errors do not repeat the URL, because it may contain a password.
pub(super) fn hosts(url: &Url, default_port: u16) -> Result<Vec<(String, u16)>, &'static str> {
    let hosts = decoded(url.host_str().unwrap_or_default())?;
    let hosts = hosts.split(',').map(|host| {
        // The port stands behind a colon. Colons inside the brackets of an address do not count.
        let address = host.rfind(']').map_or(0, |end| end + 1);
        let (name, port) = match host[address..].rsplit_once(':') {
            Some((rest, port)) => {
                let port = port
                    .parse()
                    .map_err(|_| "a port is not a number up to 65535")?;
                (&host[..address + rest.len()], port)
            }
            // If there is one host, the URL's parser has removed its port.
            None => (host, url.port().unwrap_or(default_port)),
        };
        match name {
            "" => Err("a host is missing"),
            name => Ok((name.to_owned(), port)),
        }
    });
    hosts.collect()
}

/// A part of a URL with its percent-encoding removed.
pub(super) fn decoded(part: &str) -> Result<String, &'static str> {
    let bytes = percent_decode_str(part).decode_utf8();
    bytes.map(String::from).map_err(|_| "not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses these hosts as `open` passes them on.
    fn of(hosts: &str) -> Result<Vec<(String, u16)>, &'static str> {
        super::hosts(&Url::parse(&format!("x://{hosts}/y")).unwrap(), 7)
    }

    #[test]
    fn each_host_has_its_port_or_the_default() {
        for (url, expected) in [
            ("h1", vec![("h1", 7)]),
            ("h1:1", vec![("h1", 1)]),
            ("[::1]", vec![("[::1]", 7)]),
            ("[::1]:1", vec![("[::1]", 1)]),
            (
                "h1%3A1,h2,%5B%3A%3A1%5D%3A3,%5B%3A%3A1%5D",
                vec![("h1", 1), ("h2", 7), ("[::1]", 3), ("[::1]", 7)],
            ),
        ] {
            let expected = expected
                .into_iter()
                .map(|(host, port)| (host.to_owned(), port));
            assert_eq!(of(url), Ok(expected.collect()), "{url}");
        }
    }

    #[test]
    fn a_host_or_a_port_that_is_none_is_refused() {
        for (url, reason) in [
            ("", "a host is missing"),
            ("h1,,h2", "a host is missing"),
            ("h1,%3A1", "a host is missing"),
            ("h1,h2%3Aport", "a port is not a number up to 65535"),
            ("h1,h2%3A65536", "a port is not a number up to 65535"),
            ("h1%FF", "not UTF-8"),
        ] {
            assert_eq!(of(url), Err(reason), "{url}");
        }
    }
}
