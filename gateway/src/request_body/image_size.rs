//! Width and height of an image in a data URL. Only some bytes of its header are decoded.

/// Maximum number of segments before the one with a JPEG's size. Metadata takes up a few.
const MAX_JPEG_SEGMENTS: usize = 256;

/// Width and height in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PixelSize {
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// Random access to bytes that are encoded as base64.
struct Base64Bytes<'a>(&'a [u8]);

impl PixelSize {
    /// The size of a PNG, JPEG, GIF or WebP image in a data URL or in base64 alone; `None` for other formats, for addresses and for damaged
    /// headers.
    pub(super) fn of_data(data: &str) -> Option<Self> {
        Self::of_url(data).or_else(|| Self::of_base64(data))
    }

    fn of_url(url: &str) -> Option<Self> {
        let (media_type, data) =
            url.get(..5).filter(|scheme| scheme.eq_ignore_ascii_case("data:")).and(url.split_once(','))?;
        if !media_type.ends_with(";base64") {
            return None;
        }
        Self::of_base64(data)
    }

    fn of_base64(data: &str) -> Option<Self> {
        Base64Bytes(data.as_bytes()).image_size().filter(|size| size.width > 0 && size.height > 0)
    }
}

/// Bytes at this offset of data that is encoded as base64; `None` behind its end.
pub(super) fn base64_bytes<const N: usize>(data: &str, at: usize) -> Option<[u8; N]> {
    Base64Bytes(data.as_bytes()).bytes(at)
}

impl Base64Bytes<'_> {
    /// The byte at this offset of the decoded data.
    fn byte(&self, at: usize) -> Option<u8> {
        let first = at / 3 * 4 + at % 3;
        let pair = u16::from(sextet(*self.0.get(first)?)?) << 6 | u16::from(sextet(*self.0.get(first + 1)?)?);
        // The 8 bits of a byte begin 0, 2 or 4 bits after those of its first character.
        let [_, byte] = (pair >> (4 - 2 * (at % 3))).to_be_bytes();
        Some(byte)
    }

    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        for (offset, byte) in bytes.iter_mut().enumerate() {
            *byte = self.byte(at.checked_add(offset)?)?;
        }
        Some(bytes)
    }

    fn image_size(&self) -> Option<PixelSize> {
        match self.bytes(0)? {
            [0x89, b'P', b'N', b'G'] => {
                let (width, height) =
                    (u32::from_be_bytes(self.bytes(16)?), u32::from_be_bytes(self.bytes(20)?));
                Some(PixelSize { width, height })
            }
            [0xff, 0xd8, 0xff, _] => self.jpeg_size(),
            [b'G', b'I', b'F', b'8'] => Some(PixelSize {
                width: u16::from_le_bytes(self.bytes(6)?).into(),
                height: u16::from_le_bytes(self.bytes(8)?).into(),
            }),
            [b'R', b'I', b'F', b'F'] if self.bytes(8)? == *b"WEBP" => self.webp_size(),
            _ => None,
        }
    }

    /// The size in a JPEG's frame header, behind segments of other types.
    fn jpeg_size(&self) -> Option<PixelSize> {
        let mut at: usize = 2;
        for _ in 0..MAX_JPEG_SEGMENTS {
            let [0xff, marker] = self.bytes(at)? else { return None };
            match marker {
                // Padding before a marker.
                0xff => at += 1,
                0xc4 | 0xc8 | 0xcc => at = self.jpeg_segment_end(at)?,
                0xc0..=0xcf => {
                    return Some(PixelSize {
                        width: u16::from_be_bytes(self.bytes(at + 7)?).into(),
                        height: u16::from_be_bytes(self.bytes(at + 5)?).into(),
                    });
                }
                _ => at = self.jpeg_segment_end(at)?,
            }
        }
        None
    }

    fn jpeg_segment_end(&self, at: usize) -> Option<usize> {
        let length = u16::from_be_bytes(self.bytes(at + 2)?);
        at.checked_add(2 + usize::from(length))
    }

    /// The size in the first chunk of a WebP: lossy, lossless or extended.
    fn webp_size(&self) -> Option<PixelSize> {
        match &self.bytes(12)? {
            b"VP8 " => Some(PixelSize {
                width: u32::from(u16::from_le_bytes(self.bytes(26)?)) & 0x3fff,
                height: u32::from(u16::from_le_bytes(self.bytes(28)?)) & 0x3fff,
            }),
            b"VP8L" => {
                let bits = u32::from_le_bytes(self.bytes(21)?);
                Some(PixelSize { width: (bits & 0x3fff) + 1, height: ((bits >> 14) & 0x3fff) + 1 })
            }
            b"VP8X" => {
                let [w0, w1, w2, h0, h1, h2] = self.bytes(24)?;
                Some(PixelSize {
                    width: u32::from_le_bytes([w0, w1, w2, 0]) + 1,
                    height: u32::from_le_bytes([h0, h1, h2, 0]) + 1,
                })
            }
            _ => None,
        }
    }
}

/// Six bits of a character of base64, in its standard or URL alphabet.
fn sextet(character: u8) -> Option<u8> {
    match character {
        b'A'..=b'Z' => Some(character - b'A'),
        b'a'..=b'z' => Some(character - b'a' + 26),
        b'0'..=b'9' => Some(character - b'0' + 52),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Images of 40 times 30 pixels, written by Pillow.
    const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAACgAAAAeCAIAAADRv8uKAAAALElEQVR4nO3NMQEAAAQAMJz6";
    const GIF: &str = "R0lGODdhKAAeAIEAAMgKCgAAAAAAAAAAACwAAAAAKAAeAEAIOgABCBxIsKDBgwgTKlzIsKHDhxAj";
    const LOSSY_WEBP: &str = "UklGRkwAAABXRUJQVlA4IEAAAABQAwCdASooAB4APm02l0ikIyIhJWgAgA2JZwB2AABYzxq0";
    const LOSSLESS_WEBP: &str = "UklGRh4AAABXRUJQVlA4TBEAAAAvJ0AHAAdQhSJXof+BiOh/AAA=";
    const JPEG: &str = "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAxNDQ0Hyc5PTgyPC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjL/wAARCAAeACgDASIAAhEBAxEB";

    fn size(media_type: &str, data: &str) -> Option<(u32, u32)> {
        let size = PixelSize::of_url(&format!("data:{media_type};base64,{data}"))?;
        Some((size.width, size.height))
    }

    #[test]
    fn headers_of_common_formats_are_read() {
        for (name, data) in [
            ("image/png", PNG),
            ("image/gif", GIF),
            ("image/webp", LOSSY_WEBP),
            ("image/webp", LOSSLESS_WEBP),
            ("image/jpeg", JPEG),
            ("image/anything", JPEG),
        ] {
            assert_eq!(size(name, data), Some((40, 30)), "{name}");
        }
    }

    #[test]
    fn other_urls_have_no_size() {
        for url in [
            "",
            "data:",
            "data:,",
            "data:;base64,",
            "https://host/a.png",
            "data:image/png,abc",
            "dätä:;base64,iVBORw0",
        ] {
            assert_eq!(PixelSize::of_url(url), None, "{url}");
        }
        assert_eq!(size("image/png", &PNG[..30]), None, "cut off");
        assert_eq!(size("image/png", &PNG.replacen("ACgA", "AAAA", 1)), None, "no width");
        assert_eq!(size("image/jpeg", &format!("/9j/{}", "4AAC".repeat(2000))), None, "no frame header");
    }

    proptest! {
        #[test]
        fn no_data_panics(start in 0..5_usize, data in "[A-Za-z0-9+/=_ é]{0,80}", cut in 0..60_usize) {
            let whole = [PNG, GIF, LOSSY_WEBP, LOSSLESS_WEBP, JPEG][start];
            let _ = size("image/x", &format!("{}{data}", &whole[..cut.min(whole.len())]));
            let _ = PixelSize::of_url(&data);
        }
    }
}
