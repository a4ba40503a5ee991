//! Capabilities of a quorum: what every one of its stores can do.

use dlock_core::{
    Error, ErrorKind,
    driver::{Capabilities, DriverError, Wake},
};

/// What these stores can do together.
pub(crate) fn common(store: String, each: &[&Capabilities]) -> Result<Capabilities, Error> {
    let mut all = Capabilities::new("quorum", store);
    (all.raises, all.wake, all.renew_batch) = (true, Wake::Queue, usize::MAX);
    for its in each {
        if !its.raises {
            let message = format!(
                "{} cannot be in a quorum: its fencing tokens cannot be raised to those of other stores, so the tokens of \
                 the quorum would go back; an etcd or ZooKeeper cluster is a quorum by itself",
                its.backend
            );
            return Err(DriverError::new(ErrorKind::Unsupported, message).into());
        }
        lower(&mut all, its);
    }
    Ok(all)
}

/// Whether a store that comes later keeps what the quorum promised without it.
pub(crate) fn fits(promised: &Capabilities, its: &Capabilities) -> bool {
    let mut lowered = promised.clone();
    lower(&mut lowered, its);
    its.raises && lowered == *promised
}

fn lower(all: &mut Capabilities, its: &Capabilities) {
    // A quorum wakes waiters as its weakest store does.
    all.wake = match (all.wake, its.wake) {
        (Wake::Queue, wake) | (wake, Wake::Queue) => wake,
        (Wake::Notify, Wake::Notify) => Wake::Notify,
        _ => Wake::Poll,
    };
    all.late = all.late.max(its.late);
    all.lapse = all.lapse.max(its.lapse);
    all.renew_batch = all.renew_batch.min(its.renew_batch);
    all.session_bound |= its.session_bound;
    let (start, end) = (*all.leases.start(), *all.leases.end());
    all.leases = start.max(*its.leases.start())..=end.min(*its.leases.end());
}
