//! The workspace as text, read once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Path from the root with `/`, to text. Binary files are left out.
pub(crate) static FILES: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let mut files = BTreeMap::new();
    walk(&root(), "", &mut files);
    files
});

const OURS_THOUGH_HIDDEN: [&str; 3] = [".cargo", ".ci", ".github"];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tidy is a member of the workspace")
        .to_owned()
}

/// The text of one file; a missing one is the failure.
pub(crate) fn read(path: &str) -> &'static str {
    FILES
        .get(path)
        .unwrap_or_else(|| panic!("{path} does not exist: write it"))
}

/// Files of one kind below a folder; both may be empty.
pub(crate) fn below(
    folder: &str,
    extension: &str,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES
        .iter()
        .filter(move |(path, _)| path.starts_with(folder) && path.ends_with(extension))
        .map(|(path, text)| (path.as_str(), text.as_str()))
}

/// The drivers, listed nowhere: a crate whose source implements the contract is one from its first day.
pub(crate) fn drivers() -> impl Iterator<Item = &'static str> {
    drivers_among(below("dlock-", ".rs")).into_iter()
}

fn drivers_among<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> BTreeSet<&'a str> {
    files
        .filter(|(_, text)| IMPLEMENTS.iter().any(|words| text.contains(words)))
        .filter_map(|(path, _)| path.strip_prefix("dlock-")?.split_once("/src/"))
        .map(|(backend, _)| backend)
        .collect()
}

/// How a crate says that it is a driver: by the contract itself, or by a store under the record driver.
const IMPLEMENTS: [&str; 2] = ["impl DistributedLock for", "impl RecordBacked for"];

/// Fails with everything that is wrong, not with the first.
#[track_caller]
pub(crate) fn demand(rule: &str, complaints: impl IntoIterator<Item = String>) {
    let complaints: Vec<_> = complaints.into_iter().collect();
    assert!(
        complaints.is_empty(),
        "{rule}\n  {}",
        complaints.join("\n  ")
    );
}

fn walk(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let (path, name) = (
            entry.path(),
            entry.file_name().to_string_lossy().into_owned(),
        );
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        // Hidden folders are an editor's or a machine's own, but for those that CI reads. A target directory
        // of any name carries cargo's cache tag. A file may go while others build.
        let ours = !name.starts_with('.') || OURS_THOUGH_HIDDEN.contains(&name.as_str());
        if kind.is_dir() && ours && !path.join("CACHEDIR.TAG").exists() {
            walk(&path, &format!("{prefix}{name}/"), files);
        } else if kind.is_file()
            && name != ".git" // of a worktree: a path of this machine
            && let Ok(text) = fs::read_to_string(&path)
        {
            files.insert(format!("{prefix}{name}"), text);
        }
    }
}

#[test]
fn rule_sees_a_new_driver() {
    let driver = "#[async_trait]\nimpl DistributedLock for PostgresDriver {";
    let files = [
        ("dlock-postgres/src/anything.rs", driver),
        ("dlock-core/tests/model.rs", driver),
        ("dlock-cli/src/main.rs", "fn main() {}"),
    ];
    assert_eq!(drivers_among(files.into_iter()), ["postgres"].into());
    let all: Vec<_> = drivers().collect();
    assert!(all.len() >= 6 && !all.contains(&"core"), "{all:?}");
}
