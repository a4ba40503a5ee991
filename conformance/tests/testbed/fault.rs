//! Faults that strike one request.

use std::io;

use dlock_conformance::testbed::proxy::{Fault, Flow, Reach, Trigger};

use super::proxy::{Bed, DOWN, UP, WHILE};
use super::soon;

#[tokio::test]
async fn a_lost_reply_leaves_the_request_executed_and_the_connection_open_and_deaf()
-> io::Result<()> {
    let mut bed = Bed::new().await?;
    let armed = bed.proxy.on_next(Trigger::on("take"), Fault::LoseReply);
    let mut client = bed.client().await?;
    assert_eq!(client.ask("look\n").await?, "re:look\n");
    assert!(!armed.has_struck());
    client.say("take\n").await?;
    soon(armed.struck()).await;
    client.say("more\n").await?;
    assert_eq!(
        [
            bed.executed().await,
            bed.executed().await,
            bed.executed().await
        ],
        ["look", "take", "more"]
    );
    bed.proxy.heal();
    assert!(client.hears_nothing(WHILE).await);
    assert_eq!(bed.client().await?.ask("take\n").await?, "re:take\n");
    drop(client);
    soon(bed.proxy.until(|counters| counters.open == 0)).await;
    Ok(())
}

#[tokio::test]
async fn a_cut_before_the_request_leaves_it_unexecuted() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let armed = bed
        .proxy
        .on_next(Trigger::on("take"), Fault::CutBeforeRequest);
    let mut client = bed.client().await?;
    client.say("look\ntake\n").await?;
    soon(armed.struck()).await;
    // A reply in flight at the cut may be lost with it.
    assert!(["", "re:look\n"].contains(&client.rest().await.as_str()));
    assert_eq!(
        [bed.executed().await, bed.executed().await],
        ["look", "end"]
    );
    Ok(())
}

#[tokio::test]
async fn a_cut_after_the_request_leaves_it_executed_and_unanswered() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let armed = bed
        .proxy
        .on_next(Trigger::on("take"), Fault::CutAfterRequest);
    let mut client = bed.client().await?;
    client.say("take\n").await?;
    soon(armed.struck()).await;
    assert_eq!(bed.executed().await, "take");
    assert_eq!(client.rest().await, "");
    Ok(())
}

#[tokio::test]
async fn a_held_request_is_executed_on_release_long_after_its_client_left() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let armed = bed.proxy.on_next(Trigger::on("take"), Fault::HoldRequest);
    let mut client = bed.client().await?;
    client.say("look\ntake\n").await?;
    soon(armed.struck()).await;
    assert_eq!(client.hear().await?, "re:look\n");
    drop(client);
    assert_eq!(bed.client().await?.ask("other\n").await?, "re:other\n");
    assert_eq!(
        [bed.executed().await, bed.executed().await],
        ["look", "other"]
    );
    bed.proxy.heal();
    assert_eq!(bed.executed().await, "end"); // of the other client: nothing of the held request
    armed.release();
    assert_eq!(
        [bed.executed().await, bed.executed().await],
        ["take", "end"]
    );
    Ok(())
}

#[tokio::test]
async fn a_held_request_whose_client_waited_is_answered() -> io::Result<()> {
    let bed = Bed::new().await?;
    let armed = bed.proxy.on_next(Trigger::on("take"), Fault::HoldRequest);
    let mut client = bed.client().await?;
    client.say("take\nmore\n").await?;
    soon(armed.struck()).await;
    armed.release();
    assert_eq!(
        [client.hear().await?, client.hear().await?],
        ["re:take\n", "re:more\n"]
    );
    Ok(())
}

#[tokio::test]
async fn faults_armed_together_strike_one_request_each() -> io::Result<()> {
    let bed = Bed::new().await?;
    let arm = || bed.proxy.on_next(Trigger::on("take"), Fault::LoseReply);
    let strikes = [arm(), arm()];
    for armed in &strikes {
        assert!(!armed.has_struck());
        bed.client().await?.say("take\n").await?;
        soon(armed.struck()).await;
    }
    assert_eq!(bed.client().await?.ask("take\n").await?, "re:take\n");
    Ok(())
}

#[tokio::test]
async fn a_fault_that_was_healed_does_not_strike() -> io::Result<()> {
    let bed = Bed::new().await?;
    let armed = bed
        .proxy
        .on_next(Trigger::on("take"), Fault::CutBeforeRequest);
    bed.proxy.heal();
    assert_eq!(bed.client().await?.ask("take\n").await?, "re:take\n");
    assert!(!armed.has_struck());
    Ok(())
}

#[tokio::test]
async fn needles_are_counted_in_either_direction_delivered_or_not() -> io::Result<()> {
    let bed = Bed::new().await?;
    let mut client = bed.client().await?;
    let mut requests = bed.proxy.watch(UP, "renew");
    let replies = bed.proxy.watch(DOWN, "re:renew");
    client.ask("renew\n").await?;
    assert_eq!((requests.seen(), replies.seen()), (1, 1));
    requests.mark();
    bed.proxy.set_flow(Reach::All, UP, Flow::Swallow);
    client.say("re").await?;
    client.say("new\nrenew\n").await?;
    soon(requests.reaches(2)).await;
    assert_eq!((requests.seen(), replies.seen()), (2, 1));
    Ok(())
}
