//! A named lock with options, before it is acquired.

use crate::{
    acquire::{Patience, Wish, acquire},
    error::{Error, ErrorKind},
    guard::Guard,
    identity::Owner,
    inner::Inner,
    lease::Lease,
    name::LockName,
    pass::Pass,
    terms::Terms,
};
use futures_util::FutureExt;
use std::{fmt, panic::Location, sync::Arc, time::Duration};
use tracing::Instrument;

/// A lock in a store: a name and options. No I/O, cheap to clone; acquiring it gives a [`Guard`].
///
/// Waiting is first in, first out among the tasks of one client; between clients it is as fair as the store
/// ([`Wake`](crate::Wake)). A lock is **not** re-entered by the task that holds it: ownership is a value, so a second
/// `acquire` by the same task waits, and says so. [`Guard::scope`], [`join`](Self::join) and [`owned_by`](Self::owned_by) re-enter.
#[derive(Clone)]
pub struct Lock {
    inner: Arc<Inner>,
    name: LockName,
    terms: Terms,
    owner: Option<Owner>,
}

impl Lock {
    pub(crate) fn new(inner: Arc<Inner>, name: LockName, lease: Lease) -> Self {
        Self {
            inner,
            name,
            terms: lease.into(),
            owner: None,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// A fixed lease: no watchdog, the hold ends by itself after `length` ([`MIN_LEASE`](crate::MIN_LEASE) to [`MAX_LEASE`](crate::MAX_LEASE)).
    ///
    /// # Errors
    /// `Misuse` when the length is out of bounds; `Unsupported` when this store cannot give it.
    pub fn lease(mut self, length: Duration) -> Result<Self, Error> {
        self.terms = self
            .terms
            .with_lease(self.possible(Lease::fixed(length)?)?)?;
        Ok(self)
    }

    /// A lease of another length that the watchdog keeps alive: the time after which the lock is free when this process dies. Where holds
    /// are bound to a session, no longer than that.
    ///
    /// An acquire has a third of it to be answered and a renewal a sixth: one shorter than about six round trips to the store is granted
    /// and then lost.
    ///
    /// # Errors
    /// `Misuse` when the length is out of bounds; `Unsupported` when this store cannot give it.
    pub fn kept_lease(mut self, length: Duration) -> Result<Self, Error> {
        self.terms = self
            .terms
            .with_lease(self.possible(Lease::kept(length)?)?)?;
        Ok(self)
    }

    /// Keeps the name shut for at least `time` from its acquisition: released earlier, nobody gets it before then, the former owner
    /// included. For jobs on many hosts whose clocks differ, which would otherwise run twice when they are quick. After a crash, or a
    /// fixed lease that ran out, the lease alone decides.
    ///
    /// # Errors
    /// `Misuse` when it exceeds [`max_hold`](Self::max_hold) or a fixed lease.
    pub fn at_least_for(mut self, time: Duration) -> Result<Self, Error> {
        self.terms = self.terms.at_least(time)?;
        Ok(self)
    }

    /// Stops keeping it alive `time` after its acquisition: the guard is then lost, whatever its user does.
    ///
    /// # Errors
    /// `Misuse` when it is shorter than the shortest lease or than [`at_least_for`](Self::at_least_for).
    pub fn max_hold(mut self, time: Duration) -> Result<Self, Error> {
        self.terms = self.terms.at_most(time)?;
        Ok(self)
    }

    /// The lease it would be acquired on, as the store and [`max_hold`](Self::max_hold) allow it.
    #[must_use]
    pub fn current_lease(&self) -> Lease {
        self.terms.lease()
    }

    fn possible(&self, lease: Lease) -> Result<Lease, Error> {
        let caps = &self.inner.caps;
        lease
            .on(caps)
            .map_err(|error| error.at(caps.backend, &self.name))
    }

    /// Acquires as this owner instead of a fresh one: it enters at once while one of its holds lives, here or anywhere.
    #[must_use]
    pub fn owned_by(mut self, owner: &Owner) -> Self {
        self.owner = Some(*owner);
        self
    }

    /// Acquires the lock, waiting as long as it takes.
    ///
    /// # Errors
    /// `Unavailable` when the store fails for a lease (5 s to 30 s) on end or refuses for good; `Overloaded`, `ShuttingDown`; `Gone` when
    /// the owner's incarnation that it was to enter is over. Contention is no error: it waits.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the queue. Nothing stays behind in the store: what was under way is undone in the
    /// background, one round trip after the store answers again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let _guard = client.lock("report")?.acquire().await?; // never `let _ =`: that releases at once
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        self.wish(Patience::Forever, Location::caller()).map(sure)
    }

    /// Acquires the lock, waiting at most `limit`. Without any time ([`Duration::ZERO`]) it asks once, as
    /// [`try_acquire`](Self::try_acquire) does, and says in its error who holds the lock.
    ///
    /// # Errors
    /// `Timeout` when the time is up, with the phase it was spent in; otherwise as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    #[track_caller]
    pub fn acquire_within(
        &self,
        limit: Duration,
    ) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        self.wish(Patience::Within(limit), Location::caller())
            .map(sure)
    }

    /// Acquires the lock if it is free; `None` when somebody else holds it or it is another's turn. Waits for the store's answer only,
    /// at most a third of the lease or 5 s.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), `Timeout` when the store did not answer.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        self.wish(Patience::Try, Location::caller())
    }

    /// Enters the incarnation that a pass stands for, past every queue, also from another process.
    ///
    /// # Errors
    /// `Gone` when it is over; `Misuse` when the pass is for another lock or store, `Unsupported` on a store without tokens; otherwise
    /// as [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    #[track_caller]
    pub fn join(&self, pass: &Pass) -> impl Future<Output = Result<Guard, Error>> + Send + use<> {
        let checked = self.fits(pass);
        let mut wish = self.plain(Location::caller());
        wish.owner = Some(pass.owner);
        wish.join = Some(pass.token);
        let joining = Self::spanned(Arc::clone(&self.inner), wish, Patience::Forever);
        async move {
            checked?;
            sure(joining.await)
        }
    }

    fn fits(&self, pass: &Pass) -> Result<(), Error> {
        if !self.inner.caps.fencing {
            let message = "this store has no tokens, which tell the incarnations of a lock apart";
            return Err(
                Error::new(ErrorKind::Unsupported, message).at(self.inner.caps.backend, &self.name)
            );
        }
        let message = if pass.name != self.name {
            format!("the pass is for the lock {:?}, not for this one", pass.name)
        } else if *pass.store != *self.inner.store {
            format!(
                "the pass is for the store {}, this one is {}",
                pass.store, self.inner.store
            )
        } else {
            return Ok(());
        };
        Err(Error::misuse(message).at(self.inner.caps.backend, &self.name))
    }

    fn wish(
        &self,
        patience: Patience,
        at: &'static Location<'static>,
    ) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        Self::spanned(Arc::clone(&self.inner), self.plain(at), patience)
    }

    fn plain(&self, at: &'static Location<'static>) -> Wish {
        Wish {
            name: self.name.clone(),
            terms: self.terms,
            owner: self.owner,
            join: None,
            at,
        }
    }

    fn spanned(
        inner: Arc<Inner>,
        wish: Wish,
        patience: Patience,
    ) -> impl Future<Output = Result<Option<Guard>, Error>> + Send + use<> {
        let span = tracing::debug_span!(
            target: "dlock::acquire", "acquire", lock = %wish.name, backend = inner.caps.backend
        );
        acquire(inner, wish, patience).instrument(span)
    }
}

/// Whoever waits gets a guard or an error.
fn sure(acquired: Result<Option<Guard>, Error>) -> Result<Guard, Error> {
    acquired?.ok_or_else(|| {
        Error::new(
            ErrorKind::Unavailable,
            "BUG: a wait ended without lock or error",
        )
    })
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("name", &self.name)
            .field("terms", &self.terms)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}
