//! Async methods say what errors and dropping mean; clippy sees neither behind a boxed future.

use crate::tree::{below, demand, drivers};

#[test]
fn every_public_async_method_says_what_errors_and_dropping_mean() {
    let folders = ["dlock-core/src/", "dlock/src/"].map(str::to_owned);
    let drivers = drivers().map(|driver| format!("dlock-{driver}/src/"));
    let complaints = folders
        .into_iter()
        .chain(drivers)
        .flat_map(|folder| below(&folder, ".rs").collect::<Vec<_>>())
        .flat_map(|(path, text)| {
            let found = methods(text)
                .into_iter()
                .filter(|method| method.is_public && method.is_async());
            found.flat_map(move |method| method.missing(path, true))
        });
    demand(
        "say what the server may still hold, not \"safe\" or \"unsafe\":",
        complaints,
    );
}

#[test]
fn every_driver_method_says_what_errors_and_dropping_mean() {
    let (path, text) = below("dlock-core/src/", ".rs")
        .find(|(_, text)| text.contains("pub trait DistributedLock"))
        .expect("dlock-core declares `pub trait DistributedLock`");
    let (before, rest) = text
        .split_once("pub trait DistributedLock")
        .expect("it was just found");
    let body = rest.split_once("\n}").map_or(rest, |(body, _)| body);
    let trait_docs = docs_above(&before.lines().collect::<Vec<_>>());
    let once_for_all = trait_docs.contains("# Cancel safety");
    let complaints = methods(body)
        .into_iter()
        .filter(Method::is_async)
        .flat_map(|method| method.missing(path, !once_for_all));
    demand(
        "the trait's docs are the contract that drivers are written from:",
        complaints,
    );
}

struct Method {
    is_public: bool,
    signature: String,
    docs: String,
}

impl Method {
    fn is_async(&self) -> bool {
        self.signature.contains("async fn ") || self.returns("Future<")
    }

    fn returns(&self, what: &str) -> bool {
        self.signature
            .rsplit_once("->")
            .is_some_and(|(_, returned)| returned.contains(what))
    }

    fn missing(&self, path: &str, cancel_safety: bool) -> Vec<String> {
        let lacks = |section: &str| !self.docs.lines().any(|line| line == section);
        let wanted = [
            ("# Errors", self.returns("Result<")),
            ("# Cancel safety", cancel_safety),
        ];
        let name = self
            .signature
            .split("fn ")
            .nth(1)
            .and_then(|rest| rest.split(['(', '<']).next())
            .unwrap_or("?");
        let sections = wanted
            .into_iter()
            .filter(|(section, applies)| *applies && lacks(section));
        sections
            .map(|(section, _)| format!("{path}: `{name}` lacks `{section}`"))
            .collect()
    }
}

/// Every function of the text with its docs. Knows only what rustfmt leaves: one item per line, signatures up
/// to `{` or `;`.
fn methods(text: &str) -> Vec<Method> {
    let lines: Vec<_> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().map(|line| line.trim()).enumerate() {
        let item = line.strip_prefix("pub ").unwrap_or(line);
        if item.starts_with("fn ") || item.starts_with("async fn ") || item.starts_with("const fn ")
        {
            let end = lines[at..]
                .iter()
                .position(|line| line.trim_end().ends_with(['{', ';', '}']))
                .unwrap_or(0);
            found.push(Method {
                is_public: line.starts_with("pub "),
                signature: lines[at..=at + end].join(" "),
                docs: docs_above(&lines[..at]),
            });
        }
    }
    found
}

/// The doc lines right above an item, over its attributes, also those that run over several lines.
fn docs_above(lines: &[&str]) -> String {
    let mut docs = Vec::new();
    let mut in_attribute = false;
    for line in lines.iter().rev().map(|line| line.trim()) {
        if in_attribute || line.starts_with("#[") || line.ends_with(")]") {
            in_attribute = !line.starts_with("#[");
        } else if let Some(doc) = line.strip_prefix("///") {
            docs.push(doc.trim());
        } else {
            break;
        }
    }
    docs.reverse();
    docs.join("\n")
}

#[test]
fn rule_sees_missing_sections_behind_attributes_and_long_signatures() {
    let text = "
    /// Takes it.
    ///
    /// # Errors
    ///
    /// When it cannot.
    #[tracing::instrument(
        skip(self),
    )]
    pub async fn acquire(
        &self,
    ) -> Result<Guard> {
    }
    /// Waits.
    pub fn lost(&self) -> impl Future<Output = Loss> + '_ {
    }
    pub fn name(&self) -> Result<&str> {
    }
    async fn hidden(&self) -> Result<()> {
    }
";
    let found = methods(text)
        .into_iter()
        .filter(|method| method.is_public && method.is_async());
    let complaints: Vec<_> = found
        .flat_map(|method| method.missing("x.rs", true))
        .collect();
    assert_eq!(
        complaints,
        [
            "x.rs: `acquire` lacks `# Cancel safety`",
            "x.rs: `lost` lacks `# Cancel safety`"
        ]
    );
}
