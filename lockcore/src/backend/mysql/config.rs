//! Reads the URL.

use std::fmt;

use url::Url;

use super::login::Login;
use crate::backend::hosts;
use crate::error::Error;
#[cfg(feature = "mysql-tls")]
use crate::tls::{Connector, Tls};

const PORT: u16 = 3306;

const FORM: &str = "the URL is not of the form mysql://user[:password]@host[:port]/database \
    (mysql+tls:// with TLS, and mariadb:// is the same as mysql://)";

/// The address of the server, and how to log in.
pub(super) struct Server {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) login: Login,
    #[cfg(feature = "mysql-tls")]
    pub(super) tls: Option<Connector>,
}

impl Server {
    /// Reads `mysql://user[:password]@host[:port]/database`.
    pub(super) fn plain(url: &Url) -> Result<Self, Error> {
        let wrong = |what: &str| Error::config(format!("{FORM}: {what}"));
        let decoded = |part: &str| hosts::decoded(part).map_err(wrong);
        if url.fragment().is_some() {
            return Err(wrong("nothing may follow a \"#\""));
        }
        if url.query().is_some() {
            return Err(wrong(
                "it takes no options; mysql+tls:// is the scheme with TLS",
            ));
        }
        let hosts = hosts::hosts(url, PORT).map_err(wrong)?;
        let [(host, port)] = &*hosts else {
            return Err(wrong("it names several hosts, and one is allowed"));
        };
        let login = Login {
            user: decoded(url.username())?,
            password: decoded(url.password().unwrap_or_default())?,
            database: decoded(url.path().trim_start_matches('/'))?,
        };
        let has_zero = |text: &String| text.contains('\0');
        if [&login.user, &login.password, &login.database]
            .into_iter()
            .any(has_zero)
        {
            return Err(wrong("it has a zero byte"));
        }
        if login.user.is_empty() {
            return Err(wrong("the user is missing"));
        }
        match &*login.database {
            "" => return Err(wrong("the database is missing")),
            database if database.contains('/') => {
                return Err(wrong("nothing may follow the database"));
            }
            _ => {}
        }
        Ok(Self {
            host: host.clone(),
            port: *port,
            login,
            #[cfg(feature = "mysql-tls")]
            tls: None,
        })
    }

    /// Reads `mysql+tls://…`. Reads the certificate files once, here.
    #[cfg(feature = "mysql-tls")]
    pub(super) fn encrypted(url: &Url, tls: &Tls) -> Result<Self, Error> {
        let server = Self::plain(url)?;
        let tls = Some(Connector::new(tls, &server.host)?);
        Ok(Self { tls, ..server })
    }

    pub(super) fn is_encrypted(&self) -> bool {
        #[cfg(feature = "mysql-tls")]
        return self.tls.is_some();
        #[cfg(not(feature = "mysql-tls"))]
        false
    }

    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// Shows neither the user nor the password.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.place(), self.login.database)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_password_and_database_are_taken_from_the_url() {
        let url = Url::parse("mysql://ann:p%40ss@example.com:6400/shop%2d1").unwrap();
        let server = Server::plain(&url).unwrap();

        assert_eq!(server.place(), "example.com:6400");
        assert_eq!(server.login.user, "ann");
        assert_eq!(server.login.password, "p@ss");
        assert_eq!(server.login.database, "shop-1");
        assert!(!format!("{server:?}").contains("p@ss"));

        let server = Server::plain(&Url::parse("mysql://ann@[::1]/shop").unwrap()).unwrap();
        assert_eq!(server.place(), "[::1]:3306");
    }

    #[test]
    fn a_url_that_could_be_misread_is_refused_with_the_form() {
        for url in [
            "mysql://h/shop",
            "mysql://ann@h",
            "mysql://ann@h/",
            "mysql://ann@h/shop/1",
            "mysql://ann@h/shop#1",
            "mysql://ann@h1,h2/shop",
            "mysql://ann:hunter2@h/shop?ssl-mode=required",
            "mysql://ann:hunter2%00@h/shop",
        ] {
            let error = Server::plain(&Url::parse(url).unwrap()).expect_err(url);
            let error = error.to_string();
            assert!(error.contains("mysql://user"), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
