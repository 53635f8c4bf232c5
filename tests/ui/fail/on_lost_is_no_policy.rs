use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", on_lost = abort)]
async fn another_word(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", on_lost = "signal")]
async fn text(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", on_lost)]
async fn nothing(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
