//! Detached holds: a hold without a guard, as a value that can be attached again.

use crate::{
    client::Client,
    clock::Instant,
    driver::{Renew, Renewed},
    engine::{
        Engine,
        call::{ATTEMPT_LIMIT, Call},
        hold::{First, Hold, Start},
        metrics::{Class, HoldEnd},
    },
    error::{Error, ErrorKind},
    guard::Guard,
    lease::Lease,
    options::Terms,
    owner::HoldId,
    pass::Pass,
};
use std::{fmt, panic::Location, sync::Arc};

/// A hold without a guard: see [`Guard::detach`]. It is a bearer secret, as a [`Pass`] is: its bearer may
/// renew or end this hold.
///
/// It lasts for the rest of its lease at the time of detaching. Nothing renews it, and dropping the value
/// releases nothing. The watchdog does not check it either: a lost record or a broken lock shows when the
/// hold is attached, renewed or released.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client, guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
/// let detached = guard.detach()?;
/// println!("{detached}"); // hold 2f… of "orders:42"
/// let guard = client.attach(detached).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock stays held until its lease is over, unless this is attached again"]
pub struct Detached {
    pass: Pass,
    /// The owner may own other locks, too.
    reusable: bool,
    hold: HoldId,
    terms: Terms,
    first: Option<First>,
    indeterminate_until: Option<Instant>,
    /// Of the lock that was detached; none where the hold was only written down.
    class: Option<Class>,
}

impl Detached {
    /// Builds one from its written parts: the pass, the hold id, and the lease to use when it is attached
    /// again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client, pass: dlock_core::Pass, hold: u64) -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Detached, HoldId, Lease};
    ///
    /// let detached = Detached::new(pass, HoldId::from_bits(hold), Lease::default());
    /// let guard = client.attach(detached).await?;
    /// # Ok(()) }
    /// ```
    pub fn new(pass: Pass, hold: HoldId, lease: Lease) -> Self {
        Self {
            pass,
            reusable: false,
            hold,
            terms: lease.into(),
            first: None,
            indeterminate_until: None,
            class: None,
        }
    }

    pub(crate) fn of(hold: &Hold, pass: Pass) -> Self {
        Self {
            pass,
            reusable: hold.reusable,
            hold: hold.id,
            terms: hold.terms,
            first: Some(First {
                sent: hold.sent,
                since: hold.since,
            }),
            indeterminate_until: hold.indeterminate_until,
            class: Some(hold.class.clone()),
        }
    }

    /// The pass of the incarnation that it belongs to.
    ///
    /// # Errors
    /// As [`Guard::pass`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(detached: dlock_core::Detached) -> Result<(), dlock_core::Error> {
    /// let (pass, hold, lease) = (detached.pass()?.expose(), detached.hold().to_bits(), detached.lease());
    /// // `Detached::new` builds it again from these three.
    /// # let _ = (pass, hold, lease);
    /// # Ok(()) }
    /// ```
    pub fn pass(&self) -> Result<&Pass, Error> {
        match self.reusable {
            false => Ok(&self.pass),
            true => Err(Pass::refused()),
        }
    }

    /// The id of the hold.
    ///
    /// # Examples
    /// ```
    /// # async fn example(detached: dlock_core::Detached) -> Result<(), dlock_core::Error> {
    /// println!("{:016x}", detached.hold().to_bits());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn hold(&self) -> HoldId {
        self.hold
    }

    /// The lease to use when it is attached again.
    ///
    /// # Examples
    /// ```
    /// # async fn example(detached: dlock_core::Detached) -> Result<(), dlock_core::Error> {
    /// println!("attach it within {:?}", detached.lease().length());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.terms.lease()
    }
}

/// A guard that could not be detached, and why.
///
/// # Examples
/// ```
/// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
/// match guard.detach() {
///     Ok(detached) => println!("{detached}"),
///     Err(not) => drop(not.guard.release().await?), // as where holds end with the session
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct NotDetached {
    /// The guard, as it was.
    pub guard: Guard,
    /// Why.
    #[source]
    pub error: Error,
}

impl Guard {
    /// Turns the guard into a plain value, which drop, watchdog and shutdown no longer manage. The hold
    /// lasts for the rest of its lease, unless [`Client::attach`](crate::Client::attach) takes it up again,
    /// in this process or another. Dropping the value releases nothing.
    ///
    /// # Errors
    /// [`NotDetached`] returns the guard: `Unsupported` where holds are bound to the client's session,
    /// and for a hold that depends on its client's [presence](crate::ClientBuilder::presence), `Lost` when the lock is lost.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client, guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
    /// let detached = guard.detach()?; // held for the rest of its lease, and not renewed
    /// // … later, or in another process from its written parts …
    /// let guard = client.attach(detached).await?;
    /// # Ok(()) }
    /// ```
    pub fn detach(mut self) -> Result<Detached, NotDetached> {
        let refused = if self.engine.caps.session_bound {
            let message =
                "holds of this store end with the client's session and cannot be detached";
            let error = Error::new(ErrorKind::Unsupported, message);
            Some(error.at(self.engine.caps.backend, &self.hold.name))
        } else if self.hold.presence.is_some() {
            Some(Error::depends_on_presence().at(self.engine.caps.backend, &self.hold.name))
        } else {
            let detached = self.hold.detach(&self.engine.clock);
            detached.err().map(|reason| self.lost_error(reason))
        };
        if let Some(error) = refused {
            return Err(NotDetached { guard: self, error });
        }
        self.done = true;
        self.engine.stop_renewing(&self.hold);
        let deadline = self.hold.deadline();
        self.engine.detached().insert(self.hold.id, deadline);
        self.engine.leave_table(&self.hold, HoldEnd::Detached);
        // No local release will wake this client's waiters, so they poll now.
        self.engine.wake(&self.hold.name);
        Ok(Detached::of(&self.hold, self.credential()))
    }
}

impl Client {
    /// Turns a detached hold into a guard again. It renews the hold first, so that the guard starts with a
    /// proven lease.
    ///
    /// # Errors
    /// [`NotAttached`] returns the value. `Gone` when the hold is over. `Misuse` when it is of another
    /// store, or attached already. `Unavailable` when the store does not answer within a third of the lease
    /// or 5 s; the hold is then untouched and may be attached later.
    ///
    /// # Cancel safety
    /// Dropping the future drops the value. The hold, perhaps renewed once, lasts for the rest of its
    /// lease.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client, detached: dlock_core::Detached) -> Result<(), dlock_core::Error> {
    /// let guard = client.attach(detached).await?;
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn attach(
        &self,
        detached: Detached,
    ) -> impl Future<Output = Result<Guard, NotAttached>> + Send + use<> {
        let at = Location::caller();
        let engine = Arc::clone(&self.engine);
        async move {
            let attached = attach(&engine, &detached, at).await;
            attached.map_err(|error| NotAttached {
                error: error.at(engine.caps.backend, detached.pass.name()),
                detached,
            })
        }
    }
}

/// A hold that could not be attached again, and why.
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client, detached: dlock_core::Detached) -> Result<(), dlock_core::Error> {
/// match client.attach(detached).await {
///     Ok(guard) => drop(guard.release().await?),
///     Err(not) if not.error.is_retryable() => println!("try again with {}", not.detached),
///     Err(not) => return Err(not.error),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct NotAttached {
    /// The hold, as it was.
    pub detached: Detached,
    /// Why.
    #[source]
    pub error: Error,
}

impl NotAttached {
    /// For a call that refuses the hold without [`Client::attach`], such as that of a blocking client.
    ///
    /// # Examples
    /// ```
    /// # async fn example(detached: dlock_core::Detached) {
    /// use dlock_core::{Error, NotAttached};
    ///
    /// let not = NotAttached::new(detached, Error::misuse("this thread must not wait"));
    /// println!("try again with {}", not.detached);
    /// # }
    /// ```
    pub fn new(detached: Detached, error: Error) -> Self {
        Self { detached, error }
    }
}

/// Drops the guard, which releases the lock in the background.
impl From<NotDetached> for Error {
    fn from(not: NotDetached) -> Self {
        not.error
    }
}

impl From<NotAttached> for Error {
    fn from(not: NotAttached) -> Self {
        not.error
    }
}

async fn attach(
    engine: &Arc<Engine>,
    detached: &Detached,
    at: &'static Location<'static>,
) -> Result<Guard, Error> {
    let pass = &detached.pass;
    if *pass.store() != *engine.store {
        let message = format!(
            "the hold is in the store {}, but this client uses {}",
            pass.store(),
            engine.store
        );
        return Err(Error::misuse(message));
    }
    engine.check_runtime()?;
    let _active = Engine::active(&**engine);
    if engine.is_closing() {
        return Err(Engine::closed());
    }
    let sent = engine.clock.now();
    let give_up = sent + (detached.lease().length() / 3).min(ATTEMPT_LIMIT);
    let valid_for = match renewed(engine, detached, give_up).await? {
        Renewed::Until { valid_for } => valid_for,
        Renewed::NotHeld => return Err(gone()),
    };
    let start = Start {
        name: pass.name().clone(),
        owner: *pass.owner(),
        reusable: detached.reusable,
        id: detached.hold,
        token: pass.token(),
        terms: detached.terms,
        sent,
        valid_for,
        first: detached.first,
        at,
        indeterminate_until: detached.indeterminate_until,
        ticket: None,
        class: detached
            .class
            .clone()
            .unwrap_or_else(|| engine.classes.unnamed()),
        presence: None,
    };
    let begun = engine.begin(start, engine.clock.now(), None);
    if begun.is_some() || !engine.is_closing() {
        engine.detached().remove(&detached.hold);
    }
    match begun {
        Some(hold) => Ok(Guard::new(Arc::clone(engine), hold)),
        None if engine.is_closing() => Err(Engine::closed()),
        None if engine.has_hold(pass.name(), detached.hold) => {
            Err(Error::misuse("the hold is attached already"))
        }
        None => Err(gone()),
    }
}

async fn renewed(
    engine: &Arc<Engine>,
    detached: &Detached,
    give_up: Instant,
) -> Result<Renewed, Error> {
    let lease = detached.lease();
    let name = detached.pass.name().clone();
    let ask = lease.is_renewed().then(|| lease.length());
    let entry = Renew {
        token: Some(detached.pass.token()),
        ..Renew::new(name.clone(), *detached.pass.owner(), detached.hold, ask)
    };
    let lane = engine.driver.lane(&name);
    let driver = Arc::clone(&engine.driver);
    let mut call = Call::new(&engine.calls, give_up, async move {
        driver.renew(lane, &[entry], give_up).await
    });
    let answers = call.answer().await.ok_or_else(unanswered)??;
    let answer = answers.into_iter().next().ok_or_else(unanswered)?;
    Ok(answer?)
}

fn gone() -> Error {
    Error::new(
        ErrorKind::Gone,
        "the detached hold is over: its lease ran out, or it was released or broken; acquire the lock afresh",
    )
}

fn unanswered() -> Error {
    let message = "the store did not answer in time; the hold is as it was, attach it again before its lease is over";
    Error::new(ErrorKind::Unavailable, message).with_retry(crate::RetryClass::Later)
}

impl fmt::Display for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hold {} of {:?}", self.hold, self.pass.name())
    }
}
