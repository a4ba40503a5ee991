//! Administration of locks without guards, for operators and the command line: inspect, list and break
//! locks, renew or release a hold that was written down.

use crate::{
    client::Client,
    driver::{Broken, Cursor, Holds, Release, Released, Renew, Renewed, Snapshot},
    engine::{
        Engine,
        call::{ATTEMPT_LIMIT, Call},
        presence::RESERVED,
        release::ReleaseOutcome,
    },
    error::{DriverError, Effect, Error, ErrorKind, TimeoutPhase},
    lease::Lease,
    name::LockName,
    owner::{HoldId, Mode, Owner},
    token::FencingToken,
};
use futures_util::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use std::{fmt, sync::Arc, time::Duration};

impl Client {
    /// The administration of the locks in this client's store.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let shown = client.admin().inspect("orders:42").await?;
    /// println!("{} holds", shown.holds);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn admin(&self) -> Admin {
        let engine = Arc::clone(&self.engine);
        Admin { engine }
    }
}

/// Administration of the locks in a store, whichever client holds them: from [`Client::admin`].
///
/// # Examples
/// ```
/// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
/// use futures_util::TryStreamExt;
///
/// let admin = client.admin();
/// let mut listed = admin.list("orders:");
/// while let Some(shown) = listed.try_next().await? {
///     println!("{} has {} holds", shown.name, shown.holds);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Admin {
    pub(crate) engine: Arc<Engine>,
}

impl Admin {
    /// Shows the holders of a name without changing anything.
    ///
    /// # Errors
    /// When the name is not legal, or the store did not answer.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    ///
    /// # Examples
    /// ```
    /// # async fn example(admin: dlock_core::Admin) -> Result<(), dlock_core::Error> {
    /// for holder in admin.inspect("orders:42").await?.holders {
    ///     println!("held by {}, on {}", holder.owner, holder.info);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<Snapshot, Error> {
        let name = LockName::new(name)?;
        let (driver, asked) = (Arc::clone(&self.engine.driver), name.clone());
        let shown = async move { driver.inspect(&asked).await };
        let answer = self.engine.ask(Effect::None, shown).await;
        answer.map_err(|error| error.at(self.engine.caps.backend, &name))
    }

    /// Lists the held and unavailable names that begin with `prefix`, in the store's order. A name that is
    /// taken or released meanwhile may be listed or not. The store is asked for one page at a time, when the
    /// stream is polled. Presences of clients, `~alive:…`, are listed only for a prefix that begins so.
    ///
    /// # Errors
    /// When the store did not answer; the stream ends with the error.
    ///
    /// # Cancel safety
    /// Dropping the stream loses nothing.
    ///
    /// # Examples
    /// ```
    /// # async fn example(admin: dlock_core::Admin) -> Result<(), dlock_core::Error> {
    /// use futures_util::TryStreamExt;
    ///
    /// let held: Vec<_> = admin.list("orders:").try_collect().await?;
    /// println!("{} locks", held.len());
    /// # Ok(()) }
    /// ```
    pub fn list(&self, prefix: &str) -> BoxStream<'static, Result<Snapshot, Error>> {
        let pages = Pages {
            engine: Arc::clone(&self.engine),
            prefix: prefix.into(),
            from: None,
        };
        let pages = stream::try_unfold(Some(pages), async |pages| match pages {
            Some(pages) => pages.next().await.map(Some),
            None => Ok(None),
        });
        let found = pages.map_ok(|page| stream::iter(page).map(Ok));
        found.try_flatten().boxed()
    }

    /// Frees a name, whatever owner holds it. With `only`, it does so only if that is the name's token. The
    /// holders notice at their next renewal, and until then they run beside the next holder. Break only
    /// locks whose holder is known to be dead.
    ///
    /// # Errors
    /// When the name is not legal, or the store did not answer; the effect is then unknown.
    ///
    /// # Cancel safety
    /// If the future is dropped while the request is in flight, the request may or may not be executed.
    ///
    /// # Examples
    /// ```
    /// # async fn example(admin: dlock_core::Admin) -> Result<(), dlock_core::Error> {
    /// let shown = admin.inspect("orders:42").await?;
    /// if let Some(token) = shown.holders.first().and_then(|holder| holder.token) {
    ///     admin.break_lock("orders:42", Some(token)).await?; // not a later holder's
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn break_lock(
        &self,
        name: impl AsRef<str>,
        only: Option<FencingToken>,
    ) -> Result<Broken, Error> {
        let name = LockName::new(name)?;
        let (driver, asked) = (Arc::clone(&self.engine.driver), name.clone());
        let broken = async move { driver.break_lock(&asked, only).await };
        let answer = self.engine.ask(Effect::Unknown, broken).await;
        answer.map_err(|error| error.at(self.engine.caps.backend, &name))
    }

    /// Renews, once, a hold that has no guard. The hold then lasts `length` from now, and never less than
    /// before. Returns how long it is certain to last.
    ///
    /// # Errors
    /// `NotHeld` when the hold is no longer there. `Misuse` for an illegal name or length. Otherwise as
    /// [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    /// If the future is dropped while the request is in flight, the request may or may not be executed.
    ///
    /// # Examples
    /// ```
    /// # async fn example(admin: dlock_core::Admin, detached: dlock_core::Detached) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let pass = detached.pass()?;
    /// let left = admin.renew(pass.name(), pass.owner(), detached.hold(), Duration::from_secs(30)).await?;
    /// println!("held for another {left:?}");
    /// # Ok(()) }
    /// ```
    pub async fn renew(
        &self,
        name: impl AsRef<str>,
        owner: &Owner,
        hold: HoldId,
        length: Duration,
    ) -> Result<Duration, Error> {
        let name = LockName::new(name)?;
        let engine = &self.engine;
        let lease = Lease::renewed(length).checked()?.on(&engine.caps)?.length();
        let (driver, lane) = (Arc::clone(&engine.driver), engine.driver.lane(&name));
        let entry = Renew::new(name.clone(), *owner, hold, Some(lease));
        let sent = engine.clock.now();
        let give_up = sent + ATTEMPT_LIMIT;
        let asked = async move { driver.renew(lane, &[entry], give_up).await };
        let renewed = async {
            let answers = engine.ask(Effect::Unknown, asked).await?;
            let answer = answers.into_iter().next();
            match answer.ok_or_else(|| unanswered(Effect::Unknown))?? {
                Renewed::Until { valid_for } => {
                    let end = sent + valid_for.min(lease) - Lease::margin(lease);
                    Ok(end.since(engine.clock.now()))
                }
                Renewed::NotHeld => Err(not_held()),
            }
        };
        renewed
            .await
            .map_err(|error: Error| error.at(engine.caps.backend, &name))
    }

    /// Releases holds that have no guard: one, or all of an owner. Guards of that owner elsewhere notice at
    /// their next renewal.
    ///
    /// # Errors
    /// `NotHeld` when there is no such hold. `Misuse` for an illegal name, and for all holds of a lock that is
    /// shared. Otherwise as [`inspect`](Self::inspect), with unknown effect.
    ///
    /// # Cancel safety
    /// If the future is dropped while the request is in flight, the request may or may not be executed.
    ///
    /// # Examples
    /// ```
    /// # async fn example(admin: dlock_core::Admin, owner: dlock_core::Owner) -> Result<(), dlock_core::Error> {
    /// use dlock_core::Holds;
    ///
    /// admin.release("orders:42", &owner, Holds::All).await?;
    /// # Ok(()) }
    /// ```
    pub async fn release(
        &self,
        name: impl AsRef<str>,
        owner: &Owner,
        holds: Holds,
    ) -> Result<ReleaseOutcome, Error> {
        let name = LockName::new(name)?;
        let engine = &self.engine;
        if holds == Holds::All && owner.mode() != Mode::Exclusive {
            let message =
                "this is the owner of all who share a lock: name the hold, or break the lock";
            return Err(Error::misuse(message).at(engine.caps.backend, &name));
        }
        let mut request = Release::new(name.clone(), *owner, HoldId::from_bits(0));
        request.holds = holds;
        let driver = Arc::clone(&engine.driver);
        let released = async move { driver.release(&request).await };
        let outcome = match engine.ask(Effect::Unknown, released).await {
            Ok(Released::NotHeld { .. }) => Err(not_held()),
            Ok(released) => Ok(ReleaseOutcome::of(&released)),
            Err(error) => Err(error),
        };
        outcome.map_err(|error| error.at(engine.caps.backend, &name))
    }
}

/// The rest of a listing.
struct Pages {
    engine: Arc<Engine>,
    prefix: Arc<str>,
    from: Option<Cursor>,
}

impl Pages {
    /// The next page, and what comes behind it.
    async fn next(mut self) -> Result<(Vec<Snapshot>, Option<Self>), Error> {
        let driver = Arc::clone(&self.engine.driver);
        let (prefix, from) = (Arc::clone(&self.prefix), self.from.take());
        let asked = Arc::clone(&prefix);
        let listed = async move { driver.list(&asked, from.as_ref(), PAGE).await };
        let answer = self.engine.ask(Effect::None, listed).await;
        let mut page = answer.map_err(|error| error.of(self.engine.caps.backend))?;
        if !prefix.starts_with(RESERVED) {
            page.found
                .retain(|shown| !shown.name.as_str().starts_with(RESERVED));
        }
        let rest = page.next.map(|next| Self {
            from: Some(next),
            ..self
        });
        Ok((page.found, rest))
    }
}

/// How many names one request asks for.
const PAGE: usize = 100;

impl Engine {
    /// Sends one request with a time limit. It is not repeated.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        effect: Effect,
        request: impl Future<Output = Result<T, DriverError>> + Send + 'static,
    ) -> Result<T, Error> {
        self.check_runtime()?;
        let give_up = self.clock.now() + ATTEMPT_LIMIT;
        let answer = Call::new(&self.calls, give_up, request).answer().await;
        answer.map_or_else(|| Err(unanswered(effect)), |answer| Ok(answer?))
    }
}

fn unanswered(effect: Effect) -> Error {
    let message = format!(
        "the store did not answer within {ATTEMPT_LIMIT:?}: check that it runs and can be reached"
    );
    Error::timeout(TimeoutPhase::Request, message).with_effect(effect)
}

fn not_held() -> Error {
    Error::new(
        ErrorKind::NotHeld,
        "the hold does not exist: it was released, expired, broken or taken over, or it never existed",
    )
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("store", &self.engine.store)
            .finish()
    }
}
