from vitrail_course.errata.page import page

if __name__ == "__main__":
    print(page(), end="")
