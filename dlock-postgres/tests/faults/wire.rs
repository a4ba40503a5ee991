//! Replies that the network loses, and connections that it cuts in the middle of one.

use super::{
    SECOND,
    bed::{Testbed, connected},
};
use dlock_conformance::{
    testbed::{
        Proxy,
        proxy::{Fault, Trigger},
    },
    under_test::{UnderTest, finds_the_next_holder, lasts, unknown},
};
use dlock_core::driver::{Acquired, DistributedLock, Released};

const ACQUIRE: &str = "/* dlock acquire */";
const RENEW: &str = "/* dlock renew */";
const RELEASE: &str = "/* dlock release */";

/// A test bed whose driver connects through a proxy.
async fn wired() -> (Testbed, Proxy) {
    let mut t = Testbed::start(&[]).await;
    let proxy = Proxy::start(t.server.addr()).await.unwrap();
    t.tested = UnderTest::new(connected(&t.server.url_at(proxy.addr())).await);
    (t, proxy)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_cut_at_any_byte_is_unknown_and_its_repeat_finds_one_hold() {
    let (t, proxy) = wired().await;
    let mut bytes = 0;
    loop {
        let name = format!("n{bytes}");
        let ask = t.ask(&name, SECOND * 60);
        let cut = Fault::CutMidReply { bytes };
        let armed = proxy.on_next(Trigger::on(ACQUIRE), cut);
        let first = t.driver.acquire(&ask).await;
        if matches!(first, Ok(Acquired::Granted(_))) {
            // The reply is not longer: it came whole.
            armed.disarm();
            break;
        }
        unknown(first);
        let token = t.inspect(&name).await.holders[0].token;
        let again = t.granted(&ask).await;
        assert_eq!((again.holds.get(), Some(again.token)), (1, token), "{name}");
        assert!(matches!(t.release(&ask).await, Released::Freed), "{name}");
        bytes += 13;
    }
    assert!(bytes > 13 * 5, "a reply has more than {bytes} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_or_renewal_whose_reply_is_cut_has_been_done() {
    let (t, proxy) = wired().await;
    let ask = t.taken("a").await;
    let armed = proxy.on_next(Trigger::on(RENEW), Fault::CutMidReply { bytes: 20 });
    let renewed = t.renew(std::slice::from_ref(&ask), SECOND * 600).await;
    unknown(renewed.and_then(|mut one| one.remove(0)));
    assert!(armed.has_struck());
    let rest = t.inspect("a").await.holders[0].rest.unwrap();
    assert!(rest > SECOND * 500, "{rest:?}");
    let renewed = t.renew(std::slice::from_ref(&ask), SECOND * 600).await;
    assert!(lasts(&renewed.unwrap()[0], SECOND * 600));

    let armed = proxy.on_next(Trigger::on(RELEASE), Fault::CutMidReply { bytes: 20 });
    unknown(t.give_back(&ask).await);
    assert!(armed.has_struck());
    finds_the_next_holder(&t, &t.driver, &ask).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_answers_is_given_up_and_has_one_hold() {
    let (t, proxy) = wired().await;
    let ask = t.ask("a", SECOND * 60);
    let armed = proxy.on_next(Trigger::on(ACQUIRE), Fault::LoseReply);
    unknown(t.driver.acquire(&ask).await);
    assert!(armed.has_struck());
    assert_eq!(t.granted(&ask).await.holds.get(), 1);
    assert!(matches!(t.release(&ask).await, Released::Freed));
}
