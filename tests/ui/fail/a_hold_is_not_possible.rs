use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", min_hold = "0s", max_hold = "0s")]
async fn zero(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", min_hold = "2s", max_hold = "1s")]
async fn the_wrong_way_round(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", min_hold = 2, max_hold = id)]
async fn no_duration(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", min_hold = id, max_hold = id)]
async fn no_durations(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
