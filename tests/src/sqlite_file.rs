//! A SQLite file in a temporary folder, looked at and broken from outside: by a handle of its own, as another program
//! would have it.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::thread;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _};
use tempfile::TempDir;

/// The file, and the folder that it goes with.
#[derive(Debug)]
pub struct SqliteFile {
    folder: TempDir,
}

/// The file is locked by a writer until this is dropped.
#[derive(Debug)]
#[must_use = "the file is free when this is dropped"]
pub struct Writer(Option<SqliteConnection>);

impl SqliteFile {
    /// A folder for it; the file itself comes with the first client.
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

    /// Runs statements, and returns the first column of every row as text. The file must be there.
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

    /// What is in it beyond the numbers that are remembered of each name.
    pub fn litter(&self) -> Vec<String> {
        if !self.path().exists() {
            return Vec::new();
        }
        self.query(
            "SELECT 'ticket ' || names.name || ' ' || ticket FROM tickets LEFT JOIN names ON names.key = tickets.name \
             UNION ALL SELECT 'mark ' || id FROM marks",
        )
    }

    /// Begins to write, and does not end.
    pub fn lock(&self) -> Writer {
        let path = self.path();
        elsewhere(async move {
            let mut connection = connect(&path).await;
            sqlx::query("BEGIN IMMEDIATE")
                .execute(&mut connection)
                .await
                .unwrap();
            Writer(Some(connection))
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Returns when the file is closed.
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

/// From any thread, in a runtime or not.
fn elsewhere<T: Send>(work: impl Future<Output = T> + Send) -> T {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
    };
    thread::scope(|scope| {
        let done = scope.spawn(|| runtime().unwrap().block_on(work));
        done.join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
