use lockcore::{Error, distributed_lock};

#[distributed_lock(key = name)]
async fn used_by_the_body(name: impl Into<String>) -> Result<String, Error> {
    Ok(name.into())
}

#[distributed_lock(key = name)]
async fn cloned_and_used(name: String) -> Result<String, Error> {
    Ok(name)
}

// The compiler reports this mistake only once.
#[distributed_lock(key = nmae)]
async fn misspelt(name: String) -> Result<String, Error> {
    Ok(name)
}

struct Order;

#[distributed_lock(key = order.nmae)]
async fn misspelt_field(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = order)]
async fn no_text(order: Order) -> Result<(), Error> {
    Ok(())
}

fn main() {}
