//! Provides the list of facts that are left out on a store without a queue. They are about a line
//! of requests at the store: its order, the hand-over to the next in line, or its list of waiters.
//! Facts about the contract itself state what they need in `testing::conformance`.

use libtest_mimic::Trial;

use crate::store::Kind;

/// The names of the facts, without their store and group.
const NEED_A_LINE: &[&str] = &[
    "a_bound_of_zero_passes_nothing_on",
    "a_caller_that_waits_for_any_gets_the_name_that_is_released_and_no_other",
    "a_crowd_of_writers_in_line_stays_in_line",
    "a_downgrade_whose_reply_is_lost_has_let_readers_in_and_no_writer",
    "a_grant_that_nobody_collects_goes_to_the_next_in_another_process",
    "a_grant_that_nobody_collects_goes_to_the_next_in_its_process",
    "a_holder_killed_after_its_downgrade_is_followed_when_its_lease_is_over",
    "a_holder_of_many_tasks_lets_other_processes_in",
    "a_killed_waiter_holds_up_the_line_for_two_seconds_at_most",
    "a_leader_that_gives_up_leaves_its_place_at_the_store_to_the_next",
    "a_lease_without_renewal_is_handed_over_with_its_whole_ttl",
    "a_place_in_line_is_not_left_to_a_runtime_that_has_ended",
    "a_read_that_outlives_a_dropped_write_lets_readers_in",
    "a_read_that_outlives_its_write_lets_readers_in",
    "a_reader_behind_a_waiting_writer_stays_behind_it",
    "a_reader_does_not_join_past_a_local_writer",
    "a_reader_that_is_not_alone_is_refused_at_once",
    "a_request_behind_ten_thousand_tickets_is_refused",
    "a_request_that_is_repeated_finds_its_ticket",
    "a_shared_grant_that_nobody_collects_lets_a_writer_in",
    "a_task_that_is_polled_again_gets_the_lock_after_all",
    "a_ticket_is_shown_with_the_text_of_its_holder",
    "a_waiter_dropped_in_the_moment_of_the_grant_passes_the_lock_on",
    "a_waiter_for_permits_is_woken_when_they_are_given_back",
    "a_waiter_gets_a_kept_lock_on_time_though_its_client_ends",
    "a_waiter_outlives_many_of_its_own_leases_in_line",
    "a_waiter_that_comes_after_an_extended_lease_has_its_own_ttl",
    "a_waiter_that_gives_up_does_not_hold_up_the_line",
    "a_waiter_that_goes_down_with_its_runtime_leaves_nothing",
    "a_waiter_that_has_gone_does_not_cost_its_process_the_place_of_the_leader",
    "a_writer_of_the_process_that_waits_goes_to_the_store_and_readers_stay_behind_it",
    "an_aged_ticket_is_not_passed_on",
    "another_client_does_not_re_enter",
    "another_ttl_is_another_ticket",
    "at_the_bound_the_next_stands_in_line_at_the_store",
    "cancelled_and_killed_waiters_leave_the_order_of_the_others",
    "each_ticket_is_shown_with_how_long_ago_it_was_asked_for",
    "limits_of_the_hold_begin_when_all_are_held",
    "max_hold_counts_from_the_grant",
    "nothing_is_available_while_somebody_waits",
    "readers_behind_a_writer_come_in_together",
    "readers_come_in_at_once_and_writers_do_not",
    "shutdown_does_not_wait_for_a_waiter_that_is_not_polled",
    "shutdown_ends_waiters_at_once_and_leaves_nothing",
    "wake_ups_that_were_cut_off_are_caught_up_on",
];

/// Removes the facts that the store's capability does not allow.
pub(crate) fn leave_out(store: Kind, mut trials: Vec<Trial>) -> Vec<Trial> {
    let name_of = |trial: &Trial| trial.name().rsplit("::").next().map(str::to_owned);
    let names: Vec<_> = trials.iter().filter_map(name_of).collect();
    if store.capability().queues {
        return trials;
    }
    for fact in NEED_A_LINE {
        assert!(
            names.iter().any(|name| name == fact),
            "there is no fact {fact}"
        );
    }
    trials.retain(|trial| {
        let name = name_of(trial).unwrap_or_default();
        !NEED_A_LINE.contains(&name.as_str())
    });
    trials
}
