//! How a client proves to the server that it knows the password.

use sha1_smol::Sha1;
use sha2::{Digest as _, Sha256};

/// Who logs in, and to which database.
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
    pub(super) database: String,
}

/// The answer to a server that asks for a proof of this kind, with this nonce. An error says what a
/// person must correct.
pub(super) fn prove(
    plugin: &str,
    login: &Login,
    nonce: &[u8],
    is_encrypted: bool,
) -> Result<Vec<u8>, String> {
    let password = login.password.as_bytes();
    match plugin {
        "mysql_clear_password" if is_encrypted => Ok([password, b"\0"].concat()),
        "mysql_native_password" | "caching_sha2_password" if password.is_empty() => Ok(Vec::new()),
        "mysql_native_password" => {
            let sha1 = |parts: &[&[u8]]| Sha1::from(parts.concat()).digest().bytes();
            let once = sha1(&[password]);
            Ok(mixed(&once, &sha1(&[nonce, &sha1(&[&once])])))
        }
        "caching_sha2_password" => {
            let sha256 = |parts: &[&[u8]]| Sha256::digest(parts.concat());
            let once = sha256(&[password]);
            Ok(mixed(&once, &sha256(&[&sha256(&[&once]), nonce])))
        }
        other => Err(format!(
            "the server wants a login by {other}, which lockcore does not have here; let the user \
             have mysql_native_password or caching_sha2_password"
        )),
    }
}

fn mixed(one: &[u8], other: &[u8]) -> Vec<u8> {
    one.iter()
        .zip(other)
        .map(|(one, other)| one ^ other)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_knows_the_hash_can_check_the_proof() {
        let login = Login {
            user: String::new(),
            password: "secret".to_owned(),
            database: String::new(),
        };
        let nonce = [7; 20];
        // The server keeps the hash of the hash. It finds the hash in the proof.
        let proof = prove("mysql_native_password", &login, &nonce, false).unwrap();
        let twice = Sha1::from(Sha1::from("secret").digest().bytes()).digest();
        let mask = Sha1::from([&nonce[..], &twice.bytes()].concat()).digest();
        let once = mixed(&proof, &mask.bytes());
        assert_eq!(Sha1::from(&once).digest(), twice);

        let proof = prove("caching_sha2_password", &login, &nonce, false).unwrap();
        let twice = Sha256::digest(Sha256::digest("secret"));
        let mask = Sha256::digest([&twice[..], &nonce].concat());
        assert_eq!(Sha256::digest(mixed(&proof, &mask)), twice);

        assert!(prove("mysql_clear_password", &login, &nonce, false).is_err());
    }
}
