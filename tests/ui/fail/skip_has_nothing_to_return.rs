use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", on_busy = skip)]
async fn result(id: u64) -> Result<u64, Error> {
    Ok(id)
}

struct Receipt;

#[distributed_lock(key = "order:{id}", on_busy = skip, on_error = Receipt)]
async fn other(id: u64) -> Receipt {
    Receipt
}

fn main() {}
