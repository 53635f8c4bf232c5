//! The resource: a database with the price twice, once with a fence beside it and once without.

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

    /// Sets both prices. Says which write was done.
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
        // No error: that no row was changed is how the refusal shows.
        Ok(match fenced.rows_affected() {
            0 => "the one without a fence",
            _ => "both",
        })
    }

    /// Who has set the price with the fence.
    pub async fn fenced(&self) -> sqlx::Result<String> {
        sqlx::query_scalar("SELECT set_by FROM fenced")
            .fetch_one(&self.0)
            .await
    }

    /// Who has set the other.
    pub async fn unfenced(&self) -> sqlx::Result<String> {
        sqlx::query_scalar("SELECT set_by FROM unfenced")
            .fetch_one(&self.0)
            .await
    }
}
