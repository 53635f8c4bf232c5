//! `mysql:`, at a MariaDB server. Facts share a server. There, a client has only the rights that the
//! store's guide lists.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};

use super::{
    Histories, Manner, Marks, Schemes, Server, ServerProcess, Shared, Stage, Store, Suite, Timings,
    Tls,
};
use crate::certificates::{Authority, Identity};
use crate::mysql_server::{DATABASE, MysqlServer, USER};
use crate::watch::SECRET;

/// What a person runs who makes the tables by hand.
const SCHEMA: &str = include_str!("../../../lockcore/src/backend/mysql/schema/lockcore1.sql");

#[derive(Debug)]
pub struct Mysql;

impl Store for Mysql {
    fn name(&self) -> &'static str {
        "mysql"
    }

    fn available(&self) -> Result<(), String> {
        MysqlServer::available()
    }

    fn suite(&self) -> Suite {
        Suite::beside_another(Suite::Verbs)
    }

    fn capability(&self) -> Capability {
        let url = "mysql://locks@127.0.0.1/locks";
        backend::open(url).unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings::of_a_server(Duration::from_millis(300))
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(MysqlServer::start())
    }

    /// As a user has it: by default it writes to the disk.
    fn start_for_load(&self) -> Box<dyn Server> {
        Box::new(MysqlServer::with(&["--innodb-buffer-pool-size=128M"]))
    }

    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Shared<MysqlServer>>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let server = MysqlServer::start();
                server.query(&format!("USE {DATABASE};\n{SCHEMA}"));
                let url = server.url_with_user(USER, SECRET);
                Arc::new(Shared { server, url })
            })
            .clone()
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 400,
            long: 250,
            available: || Ok(()),
            manner: Manner {
                slack: 2_000,
                // A look finds that the first lease has ended.
                tells_in_its_own_way: true,
                by_id: true,
                wakes_late: true,
                ..Manner::default()
            },
            start: || Box::new(MysqlServer::start()),
        })
    }

    fn tls(&self) -> Option<&dyn Tls> {
        Some(self)
    }
}

impl Server for MysqlServer {
    fn url(&self) -> String {
        self.url()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        let marks = format!(
            "SELECT CONCAT('mark ', HEX(id)) FROM {DATABASE}.lockcore1_marks \
             WHERE LOCATE('{namespace}:', name) = 1"
        );
        let mut litter = self.litter_but_marks(namespace);
        litter.extend(self.query(&marks));
        litter
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.query(&format!(
            "SELECT CONCAT('ticket ', name, ' ', ticket) FROM {DATABASE}.lockcore1_tickets \
             WHERE LOCATE('{namespace}:', name) = 1"
        ))
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for MysqlServer {
    fn port(&self) -> u16 {
        self.port()
    }

    fn url_at(&self, port: u16) -> String {
        self.url_at(port)
    }

    fn kill(&self) {
        self.kill();
    }

    /// A call is a text.
    fn marks(&self) -> Marks {
        Marks {
            enqueue: b"CALL lockcore1_enqueue",
            // Behind the id, in hexadecimal: the ticket keeps one permit.
            downgrade: b"00000001",
            count: b"CALL lockcore1_set_counter",
        }
    }
}

impl Tls for Mysql {
    fn schemes(&self) -> Schemes {
        Schemes {
            plain: "mysql",
            encrypted: "mysql+tls",
            not_encrypted: "the server does not use TLS",
            not_plain: "write mysql+tls://",
            says_which: true,
        }
    }

    fn connections_at_once(&self) -> u64 {
        1
    }

    fn server_speaks_first(&self) -> bool {
        true
    }

    fn database(&self) -> &'static str {
        "/lockdb"
    }

    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server> {
        let server = MysqlServer::with_tls(identity, clients, versions);
        server.query(&format!("USE {DATABASE};\n{SCHEMA}"));
        Box::new(server)
    }

    fn start_without(&self) -> Box<dyn Server> {
        Box::new(MysqlServer::start())
    }

    fn not_understood(&self) -> Option<&'static str> {
        None
    }
}

impl Stage for MysqlServer {
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&self.url()).unwrap()
    }

    /// Lets time pass by changing the times in the tables.
    fn pass(&mut self, time: Duration) {
        let micros = time.as_micros();
        let earlier = |table| {
            format!("UPDATE {DATABASE}.lockcore1_{table} SET expires_at = expires_at - {micros};")
        };
        self.query(&(earlier("tickets") + &earlier("marks")));
    }

    fn lose_data(&mut self) -> bool {
        let lost = |table| format!("TRUNCATE {DATABASE}.lockcore1_{table};");
        self.query(&["tickets", "marks", "names"].map(lost).concat());
        true
    }
}
