//! How the programs `load` and `bench` measure: one clock for all processes of a machine,
//! percentiles, and the cost of a process. The record of a lock's holders is in
//! [`turns`](crate::turns).

use std::fs;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes of a machine share.
pub fn now() -> u64 {
    nanos(ClockId::Monotonic)
}

/// Processor time of this process so far, user and system, in seconds.
pub fn cpu_seconds() -> f64 {
    seconds(nanos(ClockId::ProcessCPUTime))
}

/// Processor time of all threads of another process so far, in seconds. Zero where there is no
/// `/proc`.
pub fn cpu_seconds_of(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let on_a_core = threads.into_iter().flatten().filter_map(|thread| {
        let figures = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        figures.split(' ').next()?.parse::<u64>().ok()
    });
    seconds(on_a_core.sum())
}

pub fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn nanos(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// The resident memory of this process, in kB. Zero where there is no `/proc`.
pub fn resident_kb() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Durations in nanoseconds, sorted.
#[derive(Clone, Debug)]
pub struct Durations(Vec<u64>);

impl Durations {
    pub fn new(nanos: impl IntoIterator<Item = u64>) -> Self {
        let mut nanos: Vec<u64> = nanos.into_iter().collect();
        nanos.sort_unstable();
        Self(nanos)
    }

    /// The smallest duration that at least `percent` percent of the durations do not exceed, in
    /// microseconds. Zero if there are no durations.
    pub fn percentile_us(&self, percent: usize) -> f64 {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0
            .get(rank - 1)
            .map_or(0.0, |nanos| *nanos as f64 / 1e3)
    }

    /// The mean in microseconds. Zero if there are no durations.
    pub fn mean_us(&self) -> f64 {
        let sum: u64 = self.0.iter().sum();
        sum as f64 / 1e3 / self.0.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let durations = Durations::new([3_000, 1_000, 2_000, 4_000]);

        assert_eq!(durations.percentile_us(50), 2.0);
        assert_eq!(durations.percentile_us(99), 4.0);
        assert_eq!(durations.mean_us(), 2.5);
        assert_eq!(Durations::new([]).percentile_us(50), 0.0);
    }

    #[test]
    fn work_costs_processor_time() {
        let (began, before) = (now(), cpu_seconds());

        while now() - began < 20_000_000 {}

        assert!(cpu_seconds() > before);
        assert!(cpu_seconds_of(std::process::id()) > before);
    }
}
