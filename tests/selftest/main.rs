//! Tests of the harness with real servers: each fault does what its name says. Tests that need no
//! server are beside the code, in tests/src.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

mod install_servers;
mod load;
mod mysql_server;
mod processes;
mod proxy;
mod redis_sentinels;
mod redis_server;
mod zookeeper_server;

use libtest_mimic::{Arguments, Trial};

fn main() {
    let groups = [
        redis_server::facts(),
        redis_sentinels::facts(),
        zookeeper_server::facts(),
        mysql_server::facts(),
        proxy::facts(),
        processes::facts(),
        load::facts(),
        install_servers::facts(),
    ];
    let trials: Vec<Trial> = groups.into_iter().flatten().collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// A list of facts that need the same servers. Each fact is named after its function.
#[macro_export]
macro_rules! facts {
    ($needs:expr; $($name:ident)*) => {{
        let needs: Result<(), String> = $needs;
        let group = module_path!().rsplit("::").next().unwrap();
        vec![$(::tests::fact::fact(format!("{group}::{}", stringify!($name)), needs.clone(), $name)),*]
    }};
}
