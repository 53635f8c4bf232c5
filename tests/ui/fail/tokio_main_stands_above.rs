use lockcore::{Error, distributed_lock};

#[tokio::main(flavor = "current_thread")]
#[distributed_lock(key = "nightly")]
async fn main() -> Result<(), Error> {
    Ok(())
}

mod tests {
    use super::*;

    #[tokio::test]
    #[distributed_lock(key = "nightly")]
    async fn nightly() -> Result<(), Error> {
        Ok(())
    }

    #[tokio::main(flavor = "current_thread")]
    #[distributed_lock(key = "nightly")]
    async fn other() -> Result<(), Error> {
        Ok(())
    }
}
