//! The cost of renewing many locks over Redis.

use super::{
    redis::{driver, server},
    renewals::Renewals,
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::redis::{Leases, Setting, Textbook, connect},
    measure::Plan,
    report::Table,
};
use dlock_core::Client;
use std::sync::Arc;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let mut connection = connect(&url, Setting::Default).await?;
    Textbook::load(&mut connection).await?;
    let leases = Arc::new(Leases::take(connection, plan.locks).await?);
    let asked = CallCounts::default();
    let ours = Renewals {
        driver: driver(&url).await?,
        client: Client::new(Counted::new(driver(&url).await?, &asked))?,
        asked,
        servers: vec![pid],
        most: 2.0,
    };
    let named = ("redis-renewals", "bare script, 100 leases each");
    ours.run(&plan, named, move || {
        let leases = Arc::clone(&leases);
        async move { leases.renew(A_SCRIPT, IN_FLIGHT).await }
    })
    .await
}

/// How many leases the driver renews in one script, and how many scripts are in flight: the floor does
/// the same.
const A_SCRIPT: usize = 100;
const IN_FLIGHT: usize = 4;
