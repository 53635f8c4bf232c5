//! Tests of the variables, and of values that are refused.

use std::path::Path;

use super::*;
use crate::error::ErrorKind;

fn from(variables: &[(&str, &str)]) -> Result<Builder, Error> {
    Builder::from_variables(variables.iter().map(|(k, v)| (k.into(), v.into())))
}

fn message(variables: &[(&str, &str)]) -> String {
    let error = from(variables).expect_err("should be refused");
    assert_eq!(error.kind(), ErrorKind::Config);
    error.to_string()
}

#[test]
fn every_variable_is_read() {
    let builder = from(&[
        ("LOCK_URL", "memory:"),
        ("LOCK_NAMESPACE", "shop"),
        ("LOCK_TTL", "3s"),
        ("LOCK_WAIT", "forever"),
        ("LOCK_THROUGH_OUTAGES", "true"),
        ("LOCK_LINGER", "20ms"),
        ("LOCK_FAIR", "strict"),
        ("LOCK_OP_TIMEOUT", "250ms"),
        ("LOCK_OWNER", "billing 2.7"),
        ("LOCK_CA_FILE", "ca.pem"),
        ("LOCK_CERT_FILE", "cert.pem"),
        ("LOCK_KEY_FILE", "key.pem"),
    ])
    .unwrap();

    assert_eq!(builder.url.as_deref(), Some("memory:"));
    assert_eq!(builder.namespace, "shop");
    assert_eq!(builder.ttl, Duration::from_secs(3));
    assert_eq!(builder.wait, Wait::Forever);
    assert!(builder.through_outages);
    assert_eq!(builder.linger, Duration::from_millis(20));
    assert_eq!(builder.fair, Fair::Strict);
    assert_eq!(builder.op_timeout, Duration::from_millis(250));
    assert_eq!(builder.owner, "billing 2.7");
    let files: Vec<_> = builder.tls.given().map(|(_, file)| file).collect();
    assert_eq!(files, ["ca.pem", "cert.pem", "key.pem"].map(Path::new));
}

#[test]
fn a_word_is_read_in_upper_and_lower_case() {
    for (wait, fair) in [("forever", "strict"), ("Forever", "STRICT")] {
        let builder = from(&[
            ("LOCK_URL", "memory:"),
            ("LOCK_WAIT", wait),
            ("LOCK_FAIR", fair),
        ]);
        let builder = builder.unwrap();
        assert_eq!((builder.wait, builder.fair), (Wait::Forever, Fair::Strict));
    }
}

#[test]
fn a_variable_that_only_resembles_ours_is_a_warning_that_names_the_right_one() {
    for (written, meant) in [
        ("LOCK_WIAT", "LOCK_WAIT"),
        ("LOCK_TLL", "LOCK_TTL"),
        ("LOCK_RUL", "LOCK_URL"),
        ("LOCK_URI", "LOCK_URL"),
        ("LOCK_FIAR", "LOCK_FAIR"),
        ("LOCK_KEYFILE", "LOCK_KEY_FILE"),
        ("LOCK_TIMEOUT", "LOCK_WAIT or LOCK_OP_TIMEOUT"),
        ("LOCK_LEASE", "LOCK_TTL"),
        ("LOCKS_URL", "LOCK_URL"),
        ("LOCKCORE_NAMESPACE", "LOCK_NAMESPACE"),
    ] {
        let builder = from(&[("LOCK_URL", "memory:"), (written, "1s")]).unwrap();
        let doubts = builder.doubts(&Capability::new());
        assert_eq!(doubts.len(), 1, "{doubts:?}");
        assert!(doubts[0].contains(&format!("the environment has {written},")));
        assert!(doubts[0].contains(&format!("did you mean {meant}?")));
    }
}

#[test]
fn a_variable_of_another_program_is_told_of_none_of_ours() {
    for variable in [
        "LOCK_DIR", "LOCK_TMP", "LOCK_UID", "LOCK_TAG", "LOCK_DRY", "LOCK_",
    ] {
        let builder = from(&[("LOCK_URL", "memory:"), (variable, "1")]).unwrap();
        assert_eq!(builder.doubts(&Capability::new()), [""; 0], "{variable}");
        let error = message(&[(variable, "1")]);
        assert!(!error.contains("did you mean"), "{error}");
    }
}

#[test]
fn without_a_url_the_error_names_the_variables_that_resemble_ours() {
    let message = message(&[("LOCK_URI", "memory:"), ("LOCK_LEASE", "1s")]);
    for part in [
        "LOCK_URL is not set",
        "the environment has LOCK_URI, which lockcore does not read; did you mean LOCK_URL?",
        "the environment has LOCK_LEASE, which lockcore does not read; did you mean LOCK_TTL?",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_bad_value_of_a_variable_that_takes_a_word_names_the_word() {
    for (variable, value, word) in [
        ("LOCK_WAIT", "for ever", "forever"),
        ("LOCK_FAIR", "true", "strict"),
    ] {
        let message = message(&[("LOCK_URL", "memory:"), (variable, value)]);
        let both = format!("{variable}={value} is neither \"{word}\" nor a duration as 500ms");
        assert!(message.contains(&both), "{message}");
    }
}

#[test]
fn the_limits_of_a_ttl_are_told_as_they_are_written() {
    let message = |locks: Result<Locks, Error>| locks.expect_err("refused").to_string();
    let memory = || Locks::builder().url("memory:");
    let long = memory()
        .ttl(Duration::from_secs(366 * 24 * 60 * 60))
        .build();
    assert!(message(long).contains("this store takes 50ms to 1year"));
    let short = message(memory().ttl(Duration::from_micros(1500)).build());
    assert!(short.contains("of 1ms 500us is not usable"), "{short}");
    #[cfg(feature = "redis")]
    {
        let redis = Locks::builder().url("redis://localhost");
        let long = redis.ttl(Duration::from_secs(13 * 60 * 60)).build();
        assert!(message(long).contains("of 13h is not usable: this store takes 50ms to 12h"));
    }
}

#[test]
fn variables_that_kubernetes_sets_are_left_alone() {
    let builder = from(&[
        ("LOCK_URL", "memory:"),
        ("LOCK_PORT", "tcp://10.0.0.1:6379"),
        ("LOCK_SERVICE_HOST", "10.0.0.1"),
        ("LOCKS_PORT", "tcp://10.0.0.1:6379"),
        ("LOCKS_SERVICE_PORT", "6379"),
        ("LOCKED", "yes"),
    ]);
    assert_eq!(
        builder.unwrap().doubts(&Capability::new()),
        Vec::<String>::new()
    );
}

#[test]
fn a_bad_value_names_its_variable_and_the_accepted_form() {
    let message = message(&[("LOCK_URL", "memory:"), ("LOCK_TTL", "ten")]);
    assert!(
        message.contains("LOCK_TTL=ten") && message.contains("10s"),
        "{message}"
    );
}

#[test]
fn a_missing_url_says_what_to_set() {
    assert!(message(&[]).contains("LOCK_URL is not set"));
    assert!(
        Locks::builder()
            .build()
            .expect_err("no url")
            .to_string()
            .contains("LOCK_URL")
    );
}

#[test]
fn unusable_durations_are_refused() {
    let locks = || Locks::builder().url("memory:");
    assert!(locks().ttl(Duration::ZERO).build().is_err());
    assert!(locks().op_timeout(Duration::ZERO).build().is_err());
    assert!(locks().namespace("a:b").build().is_err());
}

#[test]
fn an_owner_that_would_break_a_line_or_fill_the_store_is_refused() {
    let long = "ä".repeat(33);
    for bad in ["a\nb", "a\0", "\u{1b}[2J", "a\u{2028}b", "a\u{85}b", &long] {
        let error = Locks::builder().url("memory:").owner(bad).build();
        let error = error.expect_err("should be refused");
        assert_eq!(error.kind(), ErrorKind::Config);
        let message = error.to_string();
        assert!(message.contains("LOCK_OWNER"), "{message}");
        assert!(message.contains("64 bytes"), "{message}");
        assert!(!message.contains(char::is_control), "{message:?}");
    }
    for good in ["", " ", "a b", "/:, {}", &"ä".repeat(32)] {
        assert!(Locks::builder().url("memory:").owner(good).build().is_ok());
    }
}

#[test]
fn the_url_does_not_show_in_debug() {
    let builder = Locks::builder().url("redis://:hunter2@localhost");
    assert!(!format!("{builder:?}").contains("hunter2"));
}

#[tokio::test]
async fn an_operation_timeout_without_end_is_usable() {
    let builder = Locks::builder().url("memory:").op_timeout(Duration::MAX);
    let locks = builder.build().unwrap();
    let lock = locks.mutex("a").wait(Wait::Forever);
    let waits = lock.clone();

    let guard = lock.acquire().await.unwrap();
    let waiter = tokio::spawn(async move { waits.acquire().await });
    let waits = async {
        while locks.inspect("a").await.unwrap()[0].local_waiters == 0 {
            tokio::task::yield_now().await;
        }
    };
    let waits = tokio::time::timeout(Duration::from_secs(10), waits);
    waits.await.expect("it does not wait");
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();

    // Each caller of a semaphore asks the store itself.
    let permit = locks.semaphore("s", 2).acquire().await.unwrap();
    permit.release().await.unwrap();
    locks.shutdown(Duration::MAX).await.unwrap();
}

#[test]
fn an_owner_that_is_much_too_long_is_not_repeated_in_the_error() {
    let owner = "x".repeat(10_000_000);
    let error = Builder::default().url("memory:").owner(owner).build();
    let error = error.unwrap_err().to_string();
    assert!(error.contains("it has 10000000 bytes"), "{error:.200}");
    assert!(error.len() < 300, "{error:.200}");
}

#[test]
fn strict_order_on_a_store_without_an_order_is_warned_of() {
    let warnings = |fair, queues| {
        let store = Capability::new().queues(queues);
        Builder::default().fair(fair).doubts(&store)
    };

    let told = warnings(Fair::Strict, false);
    assert!(told.len() == 1 && told[0].contains("LOCK_FAIR"), "{told:?}");
    for (fair, queues) in [(Fair::Strict, true), (Fair::Local(LOCAL), false)] {
        assert_eq!(warnings(fair, queues), Vec::<String>::new());
    }
}

#[test]
fn a_linger_that_has_no_effect_is_warned_of() {
    let linger = Duration::from_millis(20);
    let warnings = |fair, tells| {
        let store = Capability::new().tells_holders(tells);
        Builder::default().fair(fair).linger(linger).doubts(&store)
    };

    for (fair, tells) in [(Fair::Local(LOCAL), false), (Fair::Strict, true)] {
        let told = warnings(fair, tells);
        assert!(
            told.len() == 1 && told[0].contains("LOCK_LINGER"),
            "{told:?}"
        );
    }
    assert_eq!(warnings(Fair::Local(LOCAL), true), Vec::<String>::new());
}
