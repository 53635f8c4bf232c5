//! Tests of how long a lock is held, and of what happens when it is lost. The facts are in the
//! files of this folder.

mod grants;
mod losses;
mod min_hold;
mod overload;
mod renewal;

use libtest_mimic::Trial;

use crate::store::Kind;

pub(crate) use self::renewal::facts_of_the_kit;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        renewal::facts,
        losses::facts,
        min_hold::facts,
        overload::facts,
        grants::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}
