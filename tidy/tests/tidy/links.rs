//! Links between files: every one in a Markdown file leads to a file that is there, and to a heading that is in it.

use crate::tree::{FILES, below, demand, read, root};
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn every_link_leads_somewhere() {
    let manifest = read("Cargo.toml");
    let repository = manifest
        .lines()
        .find_map(|line| line.strip_prefix("repository = \"")?.strip_suffix('"'))
        .expect("the workspace has a repository");
    let there = |path: &str| root().join(path).exists();
    let complaints = below("", ".md").flat_map(|(path, text)| {
        let broken = links(text).into_iter().filter_map(|(line, link)| {
            let why = broken(path, link, repository, &FILES, &there)?;
            Some(format!("{path}:{line}: {link}: {why}"))
        });
        broken.collect::<Vec<_>>()
    });
    demand("links that lead nowhere:", complaints);
}

/// What is wrong with a link in the file `from`; `None`: nothing, or it leads to another site.
fn broken(
    from: &str,
    link: &str,
    repository: &str,
    files: &BTreeMap<String, String>,
    there: &impl Fn(&str) -> bool,
) -> Option<String> {
    let own = link.strip_prefix(repository).and_then(|rest| {
        let kinds = ["/blob/main/", "/tree/main/"];
        kinds.iter().find_map(|kind| rest.strip_prefix(kind))
    });
    if own.is_none() && (link.contains("://") || link.starts_with("mailto:")) {
        return None;
    }
    let (file, heading) = match own.unwrap_or(link).split_once('#') {
        Some((file, heading)) => (file, Some(heading)),
        None => (own.unwrap_or(link), None),
    };
    let path = match (file, own) {
        ("", None) => from.to_owned(),
        (file, Some(_)) => file.trim_end_matches('/').to_owned(),
        (file, None) => joined(from, file),
    };
    if !there(&path) {
        return Some(format!("there is no {path}"));
    }
    let heading = heading?;
    let known = files.get(&path).map(|text| headings(text));
    let found = known.is_some_and(|known| known.contains(heading));
    (!found).then(|| format!("{path} has no heading #{heading}"))
}

/// The path of a link that is relative to the folder of a file.
fn joined(from: &str, link: &str) -> String {
    let folder = from.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<_> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in link.split('/').filter(|part| !part.is_empty()) {
        match part {
            "." => {}
            // Above the root there is nothing to find.
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The links and images of a Markdown file with their lines: `[text](link)` and `[text]: link`, outside code.
fn links(markdown: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (at, line) in prose(markdown) {
        let inline = line
            .match_indices("](")
            .filter(|(at, _)| !in_code(line, *at));
        let inline = inline.filter_map(|(at, open)| line[at + open.len()..].split(')').next());
        let definition = line
            .strip_prefix('[')
            .and_then(|line| line.split_once("]: "))
            .map(|(_, link)| link);
        // A title may follow.
        let links = inline.chain(definition);
        found.extend(links.filter_map(|link| Some((at, link.split_whitespace().next()?))));
    }
    found
}

/// The anchors that a Markdown file has, as a code host makes them of its headings.
fn headings(markdown: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(markdown) {
        let text = line.trim_start_matches('#');
        if !(1..=6).contains(&(line.len() - text.len())) || !text.starts_with(' ') {
            continue;
        }
        let kept = text.trim().chars().filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => c.to_lowercase().next(),
            _ => None,
        });
        let anchor: String = kept.collect();
        let repeats = (1..).map(|count| format!("{anchor}-{count}"));
        let mut free = std::iter::once(anchor.clone()).chain(repeats);
        anchors.extend(free.find(|anchor| !anchors.contains(anchor)));
    }
    anchors
}

/// The numbered lines of a Markdown file outside its code blocks.
fn prose(markdown: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    let numbered = markdown.lines().enumerate();
    numbered.filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        (!is_fence && !in_block).then_some((at + 1, line))
    })
}

/// Whether an odd number of backticks stands before that place.
fn in_code(line: &str, at: usize) -> bool {
    line[..at].matches('`').count() % 2 == 1
}

#[test]
fn rule_sees_a_link_that_leads_nowhere() {
    let text = "# A `b` heading!\n## Twice\n## Twice\n```sh\n# no heading\n```\n".to_owned();
    let files = BTreeMap::from([
        ("docs/a.md".to_owned(), text.clone()),
        ("b.md".to_owned(), text),
    ]);
    let there = |path: &str| files.contains_key(path) || path == "docs";
    let why = |link| broken("docs/a.md", link, "https://host/us", &files, &there);
    for right in [
        "a.md",
        "./a.md#a-b-heading",
        "../b.md#twice-1",
        "../docs",
        "#twice",
        "https://host/us/blob/main/b.md#twice",
        "https://host/us/tree/main/docs/",
        "https://host/us/issues",
        "https://elsewhere/b.md",
        "mailto:us@host",
    ] {
        assert_eq!(why(right), None, "{right}");
    }
    for wrong in [
        "b.md",
        "../../b.md",
        "#no-heading",
        "../b.md#twice-2",
        "https://host/us/blob/main/c.md",
        "https://host/us/blob/main/b.md#gone",
    ] {
        assert!(why(wrong).is_some(), "{wrong}");
    }
}

#[test]
fn rule_finds_links_outside_code() {
    let text = "see [a](x.md#y), [`b`](z.md \"title\") and `[c](code)`\n```\n[d](code)\n```\n[e]: w.md\n![f](i.png)\n";
    let found = [(1, "x.md#y"), (1, "z.md"), (5, "w.md"), (6, "i.png")];
    assert_eq!(links(text), found);
}
