use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", on_revoke = signal)]
async fn another_word(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", on_revoke = "cancel")]
async fn text(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", on_revoke)]
async fn nothing(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
