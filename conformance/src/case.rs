//! One case, as data.

use crate::{clause::Clause, ctx::Ctx, failure::Failure, fixture::Need};
use futures_util::future::BoxFuture;

/// The function of a case.
pub(crate) type Run = fn(Ctx) -> BoxFuture<'static, Result<(), Failure>>;

/// One sentence of the contract, tested on one store.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The clause that it belongs to.
    pub clause: Clause,
    /// The sentence, with underscores.
    pub name: &'static str,
    /// The beginning of the bullet in the driver trait's docs that it tests; empty where the clause
    /// itself is the source.
    pub bullet: &'static str,
    /// What it cannot run without.
    pub needs: &'static [Need],
    /// Whether it is about the core over that driver, and not about the driver, called as the core calls it.
    pub(crate) is_of_the_core: bool,
    /// The function.
    pub(crate) run: Run,
}

impl Case {
    /// A case that any store can run.
    pub(crate) const fn new(clause: Clause, name: &'static str, run: Run) -> Self {
        Self {
            clause,
            name,
            bullet: "",
            needs: &[],
            is_of_the_core: false,
            run,
        }
    }

    /// A case about the core.
    pub(crate) const fn of_the_core(mut self) -> Self {
        self.is_of_the_core = true;
        self
    }

    /// The bullet that it tests.
    pub(crate) const fn bullet(mut self, beginning: &'static str) -> Self {
        self.bullet = beginning;
        self
    }

    /// What it cannot run without.
    pub(crate) const fn needs(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    /// Whether it needs a store of its own.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.needs.iter().any(|need| need.is_exclusive())
    }
}

/// The table `CASES` of a file, in groups of one clause. The case has the name of its function; `needs`
/// names what it cannot run without, `bullet` the beginning of the sentence of the driver trait's docs
/// that it, or its group, tests.
macro_rules! cases {
    ($([Clause::$clause:ident $(bullet($all:literal))?] $(
        $function:ident $(needs($($need:ident),+))? $(bullet($bullet:literal))?;
    )+)+) => {
        pub(super) const CASES: &[&[$crate::Case]] = &[$({
            const BULLET: &str = concat!("" $(, $all)?);
            &[$(
                $crate::Case::new($crate::Clause::$clause, stringify!($function), |ctx| {
                    Box::pin($function(ctx))
                })
                $(.needs(&[$($crate::Need::$need),+]))?
                .bullet(BULLET)
                $(.bullet($bullet))?,
            )+]
        }),+];
    };
}
pub(crate) use cases;
