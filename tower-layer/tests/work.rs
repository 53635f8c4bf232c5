//! Tests of the layer for services without HTTP. Here the requests are jobs, and the errors are
//! values of the test's own type.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use lockcore::testing::Store;
use lockcore::{Error, ErrorKind, Locks, LostReason};
use lockcore_tower::WorkLayer;
use tokio::sync::{Barrier, Notify};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

/// A job names the order that it is about. A job without one needs no lock.
#[derive(Debug, PartialEq)]
struct Job(Option<&'static str>);

const JOB: Job = Job(Some("order:42"));
const NAME: &str = "order:42";

#[derive(Debug, PartialEq)]
enum Answer {
    Done,
    Later(Job),
}

/// An error of the service. There is no conversion from an error of the lock.
#[derive(Debug, PartialEq)]
enum Failure {
    NoOrder,
    Locks(ErrorKind),
}

fn name(job: &Job) -> Result<Option<String>, Failure> {
    match job.0 {
        Some("") => Err(Failure::NoOrder),
        order => Ok(order.map(str::to_owned)),
    }
}

macro_rules! layer {
    ($locks:expr) => {
        WorkLayer::new($locks.clone(), name)
            .on_busy(|job, _| Ok::<_, Failure>(Answer::Later(job)))
            .on_error(|error| Err::<Answer, _>(Failure::Locks(error.kind())))
    };
}

fn impatient() -> Locks {
    let builder = Locks::builder().url("memory:");
    builder.wait(Duration::ZERO).build().unwrap()
}

async fn done(_: Job) -> Result<Answer, Failure> {
    Ok(Answer::Done)
}

async fn unreached(_: Job) -> Result<Answer, Failure> {
    panic!("the service should not be called")
}

/// A service that never ends. The test can wait until the service is at work.
fn endless(
    witness: &Witness,
) -> (
    Arc<Notify>,
    impl Service<Job, Response = Answer, Error = Failure, Future: Send> + Clone + Send + use<>,
) {
    let entered = Arc::new(Notify::new());
    let service = service_fn({
        let (entered, witness) = (Arc::clone(&entered), witness.clone());
        move |_: Job| {
            let (inside, entered) = (witness.inside(), Arc::clone(&entered));
            async move {
                entered.notify_one();
                pending::<()>().await;
                drop(inside);
                Ok(Answer::Done)
            }
        }
    });
    (entered, service)
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_one_order_never_overlap() {
    let inside = Arc::new(AtomicUsize::new(0));
    let service = layer!(memory()).layer(service_fn(move |_: Job| {
        let inside = Arc::clone(&inside);
        async move {
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            assert!(lockcore::held(NAME).is_some());
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            Ok(Answer::Done)
        }
    }));

    let jobs = (0..50).map(|_| tokio::spawn(service.clone().oneshot(JOB)));
    for job in in_time(futures_util::future::join_all(jobs)).await {
        assert_eq!(job.unwrap(), Ok(Answer::Done));
    }
}

#[tokio::test]
async fn jobs_of_two_orders_overlap() {
    let both_inside = Arc::new(Barrier::new(2));
    let service = layer!(memory()).layer(service_fn(move |_: Job| {
        let both_inside = Arc::clone(&both_inside);
        async move {
            both_inside.wait().await;
            Ok(Answer::Done)
        }
    }));

    let jobs = ["order:1", "order:2"].map(|order| service.clone().oneshot(Job(Some(order))));
    for job in in_time(futures_util::future::join_all(jobs)).await {
        assert_eq!(job, Ok(Answer::Done));
    }
}

#[tokio::test]
async fn a_job_whose_lock_others_have_is_given_back() {
    let locks = impatient();
    let _other = hold(&locks, NAME).await;

    let answer = layer!(locks).layer(service_fn(unreached)).oneshot(JOB);

    assert_eq!(in_time(answer).await, Ok(Answer::Later(JOB)));
}

#[tokio::test]
async fn a_lock_may_be_shared_and_have_options() {
    let locks = memory();
    let layer = WorkLayer::with_lock({
        let locks = locks.clone();
        move |_: &Job| Ok::<_, Error>(Some(locks.rwlock(NAME).read().wait(Duration::ZERO)))
    });
    let service = layer.layer(service_fn(async |_: Job| Ok::<_, Error>(Answer::Done)));

    let reader = locks.rwlock(NAME).read().acquire().await.unwrap();
    let beside = in_time(service.clone().oneshot(JOB)).await;
    assert_eq!(beside.unwrap(), Answer::Done);
    reader.release().await.unwrap();
    let _writer = hold(&locks, NAME).await;
    let refused = in_time(service.oneshot(JOB)).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Busy);
}

/// An error that can only be made from a boxed error.
#[derive(Debug)]
struct OnlyBoxed(Box<dyn std::error::Error + Send + Sync>);

#[tokio::test]
async fn a_service_error_can_be_made_from_a_boxed_lock_error() {
    let locks = impatient();
    let _other = hold(&locks, NAME).await;
    let layer = WorkLayer::new(locks, |_: &Job| Ok::<_, OnlyBoxed>(Some(NAME.to_owned())));
    let layer = layer.on_error(|error| Err::<Answer, _>(OnlyBoxed(error.into())));
    let service = layer.layer(service_fn(async |_: Job| Ok::<_, OnlyBoxed>(Answer::Done)));

    let OnlyBoxed(error) = in_time(service.oneshot(JOB)).await.unwrap_err();

    // A busy lock goes to `on_error` too, because there is no `on_busy`.
    let error: &Error = error.downcast_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy);
}

#[tokio::test]
async fn a_job_without_a_name_passes_and_one_whose_name_fails_is_refused() {
    let locks = memory();
    locks.shutdown(SOON).await.unwrap();

    let passed = layer!(locks).layer(service_fn(done)).oneshot(Job(None));
    let refused = layer!(locks)
        .layer(service_fn(unreached))
        .oneshot(Job(Some("")));

    assert_eq!(passed.await, Ok(Answer::Done));
    assert_eq!(refused.await, Err(Failure::NoOrder));
}

#[tokio::test]
async fn a_store_that_is_gone_is_an_error_and_not_busy() {
    let locks = memory();
    locks.shutdown(SOON).await.unwrap();

    let refused = layer!(locks).layer(service_fn(unreached)).oneshot(JOB);

    let lost = ErrorKind::Lost(LostReason::Shutdown);
    assert_eq!(in_time(refused).await, Err(Failure::Locks(lost)));
}

#[tokio::test]
async fn a_job_that_loses_its_lock_is_stopped_and_then_the_lock_goes() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (entered, service) = endless(&witness);

    let job = tokio::spawn(layer!(locks).layer(service).oneshot(JOB));
    in_time(entered.notified()).await;
    lose(&locks).await;

    let lost = ErrorKind::Lost(LostReason::Shutdown);
    assert_eq!(in_time(job).await.unwrap(), Err(Failure::Locks(lost)));
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the job goes before the lock"
    );
}

#[tokio::test]
async fn the_answer_to_a_loss_does_not_wait_for_the_store() {
    let store = Store::new();
    // With the clock stopped, no operation times out.
    store.clock().stop();
    let locks = store.client().unwrap();
    let entered = Arc::new(Notify::new());
    let service = layer!(locks).layer(service_fn({
        let entered = Arc::clone(&entered);
        move |_: Job| {
            entered.notify_one();
            pending::<Result<Answer, Failure>>()
        }
    }));

    let job = tokio::spawn(service.oneshot(JOB));
    in_time(entered.notified()).await;
    store.freeze();
    store.clock().advance(Duration::from_secs(10));

    let lost = ErrorKind::Lost(LostReason::Expired);
    assert_eq!(in_time(job).await.unwrap(), Err(Failure::Locks(lost)));
    store.thaw();
}

#[tokio::test]
async fn an_error_of_the_service_comes_out_with_the_lock_released() {
    let locks = memory();
    let service = layer!(locks).layer(service_fn(async |_: Job| {
        Err::<Answer, _>(Failure::NoOrder)
    }));

    assert_eq!(in_time(service.oneshot(JOB)).await, Err(Failure::NoOrder));
    assert_eq!(tickets(&locks, NAME).await, 0);
}

#[tokio::test]
async fn a_job_that_is_dropped_after_any_number_of_polls_leaves_nothing_behind() {
    let locks = memory();
    locks.ready(SOON).await.unwrap();
    let service = layer!(locks).layer(service_fn(async |_: Job| {
        tokio::task::yield_now().await;
        Ok::<_, Failure>(Answer::Done)
    }));

    let job = || service.clone().oneshot(JOB);
    let polls = drop_after_each_poll(&locks, &[NAME], job).await;

    assert!(polls >= 2, "{polls}");
}

#[tokio::test]
async fn a_job_that_is_dropped_takes_the_work_along_and_then_the_lock() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (entered, service) = endless(&witness);

    let job = tokio::spawn(layer!(locks).layer(service).oneshot(JOB));
    in_time(entered.notified()).await;
    job.abort();
    assert!(job.await.unwrap_err().is_cancelled());

    nothing_is_left(&locks, NAME).await;
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the job goes before the lock"
    );
}

#[tokio::test]
async fn a_job_that_waits_keeps_no_place_in_the_service() {
    let locks = memory();
    let other = hold(&locks, NAME).await;
    let limited = ConcurrencyLimitLayer::new(1).layer(service_fn(async |_: Job| {
        tokio::task::yield_now().await;
        Ok::<_, Failure>(Answer::Done)
    }));
    let service = layer!(locks).layer(limited);

    let waits = tokio::spawn(service.clone().oneshot(JOB));
    until_tickets(&locks, NAME, 2).await;
    let beside = in_time(service.oneshot(Job(Some("order:43")))).await;
    assert_eq!(beside, Ok(Answer::Done));

    other.release().await.unwrap();
    assert_eq!(in_time(waits).await.unwrap(), Ok(Answer::Done));
}

/// A job has the only permit of the service, and waits for a lock. The job that holds this lock
/// waits for the permit.
#[tokio::test]
async fn a_job_waits_for_its_service_no_longer_than_it_may_and_is_given_back() {
    let locks = memory();
    let other = hold(&locks, NAME).await;
    let entered = Arc::new(Notify::new());
    let limited = ConcurrencyLimitLayer::new(1).layer(service_fn({
        let (locks, entered) = (locks.clone(), Arc::clone(&entered));
        move |_: Job| {
            let (locks, entered) = (locks.clone(), Arc::clone(&entered));
            async move {
                entered.notify_one();
                nothing_is_left(&locks, NAME).await;
                Ok::<_, Failure>(Answer::Done)
            }
        }
    }));
    let layer = WorkLayer::new(locks.clone(), name).on_busy(|job, error: Error| {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("not ready in time"), "{error}");
        Ok::<_, Failure>(Answer::Later(job))
    });
    let layer = layer.on_error(|error| Err::<Answer, _>(Failure::Locks(error.kind())));
    let service = layer.ready_within(Duration::from_millis(50)).layer(limited);

    let waits = tokio::spawn(service.clone().oneshot(JOB));
    until_tickets(&locks, NAME, 2).await;
    let first = tokio::spawn(service.oneshot(Job(Some("order:1"))));
    in_time(entered.notified()).await;
    other.release().await.unwrap();

    assert_eq!(in_time(waits).await.unwrap(), Ok(Answer::Later(JOB)));
    assert_eq!(in_time(first).await.unwrap(), Ok(Answer::Done));
}

#[tokio::test]
async fn a_job_with_a_name_too_many_is_given_back_before_the_store_hears_of_it() {
    const HOUR: Duration = Duration::from_secs(3600);
    let store = Store::new();
    let locks = store.client().unwrap();
    let layer = WorkLayer::new(locks, name).on_busy(|job, error: Error| {
        assert_eq!((error.kind(), error.name()), (ErrorKind::Unavailable, None));
        assert!(error.to_string().contains("too many different"), "{error}");
        Ok::<_, Failure>(Answer::Later(job))
    });
    let layer = layer.on_error(|error| Err::<Answer, _>(Failure::Locks(error.kind())));
    let layer = layer.max_names(2, HOUR);
    let job = |name: &'static str| in_time(layer.layer(service_fn(done)).oneshot(Job(Some(name))));
    for name in ["a", "b", "a"] {
        assert_eq!(job(name).await, Ok(Answer::Done), "{name}");
    }

    // From here on, the store answers no request.
    store.freeze();
    let too_many = job("c").await;
    store.thaw();

    assert_eq!(too_many, Ok(Answer::Later(Job(Some("c")))));
    assert_eq!(job("b").await, Ok(Answer::Done));
    let unlocked = layer.layer(service_fn(done)).oneshot(Job(None));
    assert_eq!(unlocked.await, Ok(Answer::Done));
}
