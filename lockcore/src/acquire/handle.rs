//! The client, which all of its handles share.

use std::fmt;
use std::sync::Arc;

use super::lanes::Lanes;
use crate::backend::Backend;
use crate::client::keeper::Keeper;
use crate::client::settings::Settings;
use crate::client::shared::Shared;
use crate::error::Error;
#[cfg(debug_assertions)]
use crate::inversions::Inversions;
use crate::owner::Owner;
#[cfg(all(test, lockcore_loom))]
use crate::owner::OwnerText;

/// The state that all handles of one client share.
pub(crate) struct Client {
    pub(crate) shared: Arc<Shared>,
    pub(crate) lanes: Arc<Lanes>,
    /// The owner text of this client's tickets, by which [`Locks::inspect`](crate::Locks::inspect)
    /// finds them.
    pub(crate) owner: Owner,
    #[cfg(debug_assertions)]
    pub(crate) inversions: Inversions,
    /// Ends the keeper's thread when the last handle is dropped.
    _keeper: Keeper,
}

impl Client {
    /// Starts the keeper's thread.
    pub(crate) fn start(
        backend: Arc<dyn Backend>,
        settings: Settings,
        owner: Owner,
    ) -> Result<Arc<Self>, Error> {
        let (keeper, shared) = Keeper::start(backend, settings)?;
        shared.tell_start();
        Ok(Arc::new(Self {
            lanes: Lanes::new(&shared),
            shared,
            owner,
            #[cfg(debug_assertions)]
            inversions: Inversions::default(),
            _keeper: keeper,
        }))
    }
}

#[cfg(all(test, lockcore_loom))]
impl Client {
    /// For a loom model that does the keeper's work itself.
    pub(crate) fn without_thread(shared: &Arc<Shared>, lanes: Arc<Lanes>) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            lanes,
            owner: Owner::of_this_process(&OwnerText::default()),
            #[cfg(debug_assertions)]
            inversions: Default::default(),
            _keeper: Keeper::without_thread(shared),
        })
    }
}

/// Shows only the fields that tell clients apart.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("namespace", &self.shared.namespace.as_str())
            .field("owner", &self.owner.whole)
            .field("fair", &self.shared.defaults.fair)
            .finish_non_exhaustive()
    }
}
