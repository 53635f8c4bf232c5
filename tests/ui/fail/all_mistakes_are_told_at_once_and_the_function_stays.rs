use lockcore::distributed_lock;

struct Shop;

impl Shop {
    #[distributed_lock(key = "{}:{a", wiat = "1s", try, wait = "soon", ttl = "0s", held = lock, shared = 1)]
    fn settle(id: u64) {
        // There is no error here or at the call, because `lock` and `settle` are known.
        lock.grant_id();
    }

    async fn call() {
        Shop::settle(7).await
    }
}

fn main() {}
