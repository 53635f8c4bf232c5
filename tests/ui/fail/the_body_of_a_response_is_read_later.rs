use lockcore::{Error, distributed_lock};

mod axum {
    pub mod body {
        pub struct Body;
    }

    pub mod response {
        pub struct Response<T = super::body::Body>(pub T);
    }
}

use axum::body::Body;
use axum::response::Response;

#[distributed_lock(key = "order:{id}")]
async fn response(id: u64) -> Result<Response, Error> {
    Ok(Response(Body))
}

#[distributed_lock(key = "order:{id}")]
async fn with_its_path(id: u64) -> Result<axum::response::Response, Error> {
    Ok(Response(Body))
}

#[distributed_lock(key = "order:{id}")]
async fn of_http(id: u64) -> Result<Response<Body>, Error> {
    Ok(Response(Body))
}

#[distributed_lock(key = "order:{id}", on_error = Response(Body))]
async fn without_result(id: u64) -> Response {
    Response(Body)
}

#[distributed_lock(key = "order:{id}")]
async fn body(id: u64) -> Result<Option<Body>, Error> {
    Ok(Some(Body))
}

// The calls are written as if the function were async.
#[distributed_lock(key = "order:{id}")]
fn not_async(id: u64) -> Result<Response, Error> {
    Ok(Response(Body))
}

async fn call() -> Result<Response, Error> {
    not_async(7).await
}

fn main() {}
