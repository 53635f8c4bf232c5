//! A SQLite file in a temporary folder. Tests read and damage it with connections of their own, as
//! another program would.

use std::path::{Path, PathBuf};

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _};
use tempfile::TempDir;

use crate::elsewhere::elsewhere;

/// The file and its folder.
#[derive(Debug)]
pub struct SqliteFile {
    folder: TempDir,
}

/// A transaction that lasts until this value is dropped.
#[derive(Debug)]
#[must_use = "the transaction ends when this is dropped"]
pub struct Transaction(Option<SqliteConnection>);

impl SqliteFile {
    /// Makes the folder. The first client makes the file.
    #[allow(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("locks.db")
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn url(&self) -> String {
        format!("sqlite:{}", self.path().display())
    }

    /// Runs statements, and returns the first column of every row as text. The file must exist.
    pub fn query(&self, statements: &str) -> Vec<String> {
        let (path, statements) = (self.path(), statements.to_owned());
        elsewhere(async move {
            let mut connection = connect(&path).await;
            let rows = sqlx::raw_sql(AssertSqlSafe(statements))
                .fetch_all(&mut connection)
                .await
                .unwrap();
            connection.close().await.unwrap();
            rows.iter()
                .map(|row| row.try_get_unchecked::<String, _>(0).unwrap())
                .collect()
        })
    }

    /// All rows that should not outlive the locks. The last number of each name is left out.
    pub fn litter(&self) -> Vec<String> {
        if !self.path().exists() {
            return Vec::new();
        }
        self.query(
            "SELECT 'ticket ' || names.name || ' ' || ticket FROM tickets LEFT JOIN names ON names.key = tickets.name \
             UNION ALL SELECT 'mark ' || id FROM marks",
        )
    }

    /// Begins a write transaction, which lasts until the returned value is dropped.
    pub fn lock(&self) -> Transaction {
        self.begin("BEGIN IMMEDIATE")
    }

    /// Begins a read transaction, which lasts until the returned value is dropped.
    pub fn read(&self) -> Transaction {
        self.begin("BEGIN; SELECT * FROM store")
    }

    fn begin(&self, statements: &'static str) -> Transaction {
        let path = self.path();
        elsewhere(async move {
            let mut connection = connect(&path).await;
            let begun = sqlx::raw_sql(statements).execute(&mut connection).await;
            begun.unwrap();
            Transaction(Some(connection))
        })
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        // This returns when the file is closed.
        if let Some(connection) = self.0.take() {
            let _ = elsewhere(connection.close());
        }
    }
}

async fn connect(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new()
        .filename(path)
        .connect()
        .await
        .unwrap()
}
