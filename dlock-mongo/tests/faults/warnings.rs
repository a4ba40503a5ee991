//! The warnings that this process logged.

use parking_lot::Mutex;
use std::{fmt, sync::OnceLock};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

static HEARD: OnceLock<Mutex<Vec<String>>> = OnceLock::new();

struct Listener;

/// Records warnings from now on. One call is enough.
pub(crate) fn listen() {
    HEARD.get_or_init(|| {
        tracing::subscriber::set_global_default(Listener).unwrap();
        Mutex::default()
    });
}

/// How many of the warnings contain all these texts. Tests that run at the same time warn too.
pub(crate) fn count<const N: usize>(texts: [&str; N]) -> usize {
    let heard = HEARD.get().map(Mutex::lock).unwrap();
    let has_all = |words: &&String| texts.iter().all(|text| words.contains(text));
    heard.iter().filter(has_all).count()
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        *metadata.level() == Level::WARN
            && (target == "dlock::settings" || target.starts_with("dlock_mongo"))
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut words = Words(String::new());
        event.record(&mut words);
        if let Some(heard) = HEARD.get() {
            let mut heard = heard.lock();
            heard.push(words.0);
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
        self.0.push_str(&format!("{value:?} "));
    }
}
