//! The resource: a database with two prices, one with a fence and one without.

use std::path::Path;

use lockcore::FencingToken;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};

#[derive(Clone, Debug)]
pub struct Prices(SqlitePool);

impl Prices {
    pub async fn create(folder: &Path) -> sqlx::Result<Self> {
        let prices = Self::open(folder).await?;
        sqlx::raw_sql(
            "CREATE TABLE fenced (set_by TEXT, lock_token BIGINT NOT NULL DEFAULT 0);
             CREATE TABLE unfenced (set_by TEXT);
             INSERT INTO fenced (set_by) VALUES ('nobody');
             INSERT INTO unfenced (set_by) VALUES ('nobody');",
        )
        .execute(&prices.0)
        .await?;
        Ok(prices)
    }

    pub async fn open(folder: &Path) -> sqlx::Result<Self> {
        let file = SqliteConnectOptions::new()
            .filename(folder.join("prices.db"))
            .create_if_missing(true);
        Ok(Self(SqlitePool::connect_with(file).await?))
    }

    /// Sets both prices. Returns which of the writes were done.
    pub async fn set(&self, who: &'static str, token: FencingToken) -> sqlx::Result<&'static str> {
        let fenced =
            sqlx::query("UPDATE fenced SET set_by = $1, lock_token = $2 WHERE lock_token <= $2")
                .bind(who)
                .bind(token.as_i64())
                .execute(&self.0)
                .await?;
        sqlx::query("UPDATE unfenced SET set_by = $1")
            .bind(who)
            .execute(&self.0)
            .await?;
        // A refused write is not an error: no row was changed.
        Ok(match fenced.rows_affected() {
            0 => "the one without a fence",
            _ => "both",
        })
    }

    /// The process that set the price with the fence.
    pub async fn fenced(&self) -> sqlx::Result<String> {
        sqlx::query_scalar("SELECT set_by FROM fenced")
            .fetch_one(&self.0)
            .await
    }

    /// The process that set the price without the fence.
    pub async fn unfenced(&self) -> sqlx::Result<String> {
        sqlx::query_scalar("SELECT set_by FROM unfenced")
            .fetch_one(&self.0)
            .await
    }
}
