use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{od}")]
async fn plain(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = r#"order:"{od}""#)]
async fn plain_in_a_raw_text(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}:{order.region}")]
async fn with_field(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
