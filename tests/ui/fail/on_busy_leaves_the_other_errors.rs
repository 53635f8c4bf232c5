use lockcore::distributed_lock;

#[distributed_lock(key = "order:{id}", on_busy = skip)]
async fn nothing(id: u64) {}

#[distributed_lock(key = "order:{id}", on_busy = skip)]
async fn option(id: u64) -> Option<u64> {
    Some(id)
}

fn main() {}
