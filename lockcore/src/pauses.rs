//! Random pauses between attempts. If many clients fail at the same time, they do not try again at
//! the same time.

use std::time::Duration;

/// Pauses that double from the first to the longest. Each is drawn with full jitter: see
/// [`jittered`].
#[derive(Clone, Debug)]
pub(crate) struct Pauses {
    next: Duration,
    longest: Duration,
}

impl Pauses {
    pub(crate) const fn between(first: Duration, longest: Duration) -> Self {
        Self {
            next: first,
            longest,
        }
    }

    /// Draws the next pause.
    pub(crate) fn draw(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        jittered(pause)
    }
}

/// The pauses after a failure of a store or of a body: from 20 ms to 2 s.
impl Default for Pauses {
    fn default() -> Self {
        Self::between(Duration::from_millis(20), Duration::from_secs(2))
    }
}

/// Full jitter: a random time between a tenth of `pause` and all of it.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.1 + 0.9 * fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_are_never_shorter_than_a_tenth() {
        let (first, longest) = (Duration::from_millis(20), Duration::from_millis(70));
        let mut pauses = Pauses::between(first, longest);

        for most in [first, first * 2, longest, longest] {
            let pause = pauses.draw();
            assert!(pause >= most / 10 && pause <= most, "{pause:?} of {most:?}");
        }
    }
}
