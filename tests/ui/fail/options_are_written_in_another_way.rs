use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", timeout: "2s")]
async fn with_a_colon(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", timeout("2s"), url("redis://"))]
async fn as_a_call(id: u64) -> Result<(), Error> {
    Ok(())
}

// A call or a path after a template is reported as an argument, not as an option.
#[distributed_lock(key = "order:{}:{}", text(id), Order::ID)]
async fn arguments(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
