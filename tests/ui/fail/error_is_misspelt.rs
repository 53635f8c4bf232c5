use lockcore::distributed_lock;

#[distributed_lock(key = "order:{id}", on_error = eprintln!("no lock: {eror}"))]
async fn settle(id: u64) {}

#[distributed_lock(key = "order:{id}")]
async fn body(id: u64) -> Result<(), lockcore::Error> {
    // The name `error` exists only in `on_busy` and `on_error`.
    Err(error)
}

fn main() {}
