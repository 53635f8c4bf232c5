use lockcore::{Error, distributed_lock};

use std::rc::Rc;

#[distributed_lock(key = "order:{id}")]
async fn settle(id: u64) -> Result<(), Error> {
    let shared = Rc::new(id);
    std::future::ready(()).await;
    drop(shared);
    Ok(())
}

fn needs_send(_: impl Send) {}

fn spawn() {
    needs_send(settle(7));
}

fn main() {}
