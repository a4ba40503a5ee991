//! The frames of an HTTP/2 stream of bytes (RFC 9113, section 4.1).

/// Where a stream of frames stands. On other protocols it finds nothing of use, and is not asked.
#[derive(Debug, Default)]
pub(super) struct Frames {
    header: Vec<u8>,
    /// The bytes of the current frame that follow its header and have not passed yet.
    payload: usize,
}

impl Frames {
    /// Passes over the next bytes and says whether the header of a DATA frame ends in them.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) -> bool {
        let mut has_data = false;
        while !bytes.is_empty() {
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            let missing = (HEADER - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if let [high, middle, low, kind, ..] = self.header[..]
                && self.header.len() == HEADER
            {
                self.payload =
                    usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                has_data |= kind == DATA;
                self.header.clear();
            }
        }
        has_data
    }
}

const HEADER: usize = 9;

/// The type of a DATA frame.
const DATA: u8 = 0;

#[cfg(test)]
mod tests {
    use super::Frames;

    #[test]
    fn a_data_frame_is_found_wherever_the_bytes_are_split() {
        let ping = [&[0, 0, 8, 6, 0, 0, 0, 0, 0], &[0; 8][..]].concat();
        let data = [&[0, 0, 5, 0, 1, 0, 0, 0, 1], &[0; 5][..]].concat();
        let stream = [&ping[..], &ping, &data].concat();
        for size in 1..=stream.len() {
            let mut frames = Frames::default();
            let found: Vec<_> = stream
                .chunks(size)
                .map(|piece| frames.pass(piece))
                .collect();
            let header_ends_in = (2 * ping.len() + 8) / size;
            let expected: Vec<_> = (0..found.len())
                .map(|piece| piece == header_ends_in)
                .collect();
            assert_eq!(found, expected, "pieces of {size} bytes");
        }
    }
}
