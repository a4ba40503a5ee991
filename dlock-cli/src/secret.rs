//! Secrets from files: every user of the machine sees arguments in `ps`.

use crate::output::Output;
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::Path,
};

/// Whether a path means standard input.
pub(crate) fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

/// Reads the one line of a file, or of standard input.
pub(crate) fn read(path: &Path, output: &Output) -> Result<String, String> {
    let (source, text) = if is_stdin(path) {
        ("standard input".to_owned(), text(io::stdin()))
    } else {
        let source = path.display().to_string();
        (source, open(path, output).and_then(text))
    };
    let text = text.map_err(|error| format!("cannot read {source}: {error}"))?;
    let line = text.trim();
    if line.is_empty() || line.contains('\n') {
        return Err(format!("{source} must have one line, and nothing else"));
    }
    Ok(line.to_owned())
}

fn open(path: &Path, output: &Output) -> io::Result<File> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.permissions().mode() & OTHERS_READ != 0 {
        let path = path.display();
        output.warn(&format!(
            "every user of this machine can read {path}: chmod o-r {path}"
        ));
    }
    Ok(file)
}

fn text(source: impl Read) -> io::Result<String> {
    let mut text = String::new();
    source.take(LONGEST).read_to_string(&mut text)?;
    Ok(text)
}

const OTHERS_READ: u32 = 0o004;

/// Far longer than any URL. A wrong path such as /dev/zero has no end.
const LONGEST: u64 = 64 * 1024;
