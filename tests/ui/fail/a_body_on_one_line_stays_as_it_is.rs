#![deny(warnings)]

use lockcore::{Error, distributed_lock};

// Each function has one mistake. The compiler says nothing about braces.
#[rustfmt::skip]
#[distributed_lock(kye = "order:{id}")]
async fn settle(id: u64) -> Result<u64, Error> { Ok(id) }

#[rustfmt::skip]
#[distributed_lock(kye = "order:{id}", held = lock)]
async fn with_its_lock(id: u64) -> Result<u64, Error> { Ok(id + lock.grant_id().as_u64()) }

#[rustfmt::skip]
#[distributed_lock(kye = "order:{id}")]
async fn awaits(id: u64) -> Result<u64, Error> { settle(id).await }

fn main() {}
